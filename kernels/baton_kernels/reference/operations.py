"""The small operations, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, hidden], weight [hidden]: float64 [rows, hidden]."""
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def rope(x: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """x [rows, heads, head_dim], positions int64 [rows], frequencies [head_dim / 2]: float64 as x.

    Dimension i turns with dimension i + head_dim / 2.
    """
    x = x.double()
    angles = positions.double()[:, None] * inverse_frequencies.double()
    cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [rows, ffn]: float64 [rows, ffn]."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [out, in], bias [out]: float64 [rows, out]."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def attention(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of one sequence with the full softmax.

    Args:
        queries: [rows, heads, head_dim], of positions start, start + 1, ...
        keys, values: [start + rows, kv_heads, head_dim].

    Returns:
        float64 [rows, heads * head_dim].
    """
    rows, heads, head_dim = queries.shape
    shared = heads // keys.shape[1]
    keys, values = (x.double().repeat_interleave(shared, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * head_dim**-0.5
    seen = torch.arange(len(keys)) <= start + torch.arange(rows)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).reshape(rows, heads * head_dim)
