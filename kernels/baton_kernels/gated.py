"""Gated activation (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of float32 [rows, 2 * ffn], gate first: a new float32 tensor [rows, ffn].

    Spelt out with `exp`: torch's own `silu` rounds differently in the tails of its vector loop, whose
    place depends on the row count and the threads.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    denominator = torch.exp(-gate).add_(1.0)
    return torch.div(gate, denominator).mul_(up)
