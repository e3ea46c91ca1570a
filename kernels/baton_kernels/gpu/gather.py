"""Rows of a table by index: token embeddings, and the rows whose logits are wanted."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.launch import launch

BLOCK = 1_024


@triton.jit
def _gather_rows(table, ids, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    source = tl.load(ids + row).to(tl.int64)
    values = tl.load(table + source * width + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, values.to(tl.float32).to(out.dtype.element_ty), mask=inside)


def gather_rows(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """`out[i] = table[ids[i]]`.

    Args:
        table: [n, width], any float type, contiguous.
        ids: int32 [rows], each in 0 to n - 1: not checked here.
        out: [rows, width], any float type, contiguous.
    """
    rows, width = out.shape
    args = {"table": table, "ids": ids, "out": out, "width": width}
    launch(_gather_rows, (rows, triton.cdiv(width, BLOCK)), args, {"BLOCK": BLOCK})
