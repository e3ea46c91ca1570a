"""Gated activation (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.launch import launch

BLOCK = 1_024


@triton.jit
def _silu_mul(gate_up, out, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < ffn
    gate = tl.load(gate_up + row * 2 * ffn + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn + ffn + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * ffn + at, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """`out = silu(gate) * up` in float32, rounded once.

    Args:
        gate_up: [rows, 2 * ffn], any float type, contiguous, gate first.
        out: [rows, ffn], any float type, contiguous.

    A program takes `BLOCK` columns of a row; what lies past `ffn` is neither read nor written.
    """
    rows, ffn = out.shape
    launch(
        _silu_mul,
        (rows, triton.cdiv(ffn, BLOCK)),
        {"gate_up": gate_up, "out": out, "ffn": ffn},
        {"BLOCK": BLOCK},
    )
