"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual's sum."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.launch import launch, power_of_two


@triton.jit
def _rms_norm(
    x, update, weight, out, picked, eps, hidden,
    BLOCK: tl.constexpr, ADD: tl.constexpr, PICK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(picked + row).to(tl.int64) if PICK else row
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    values = tl.load(x + source * hidden + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(update + source * hidden + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + source * hidden + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / hidden + eps)
    values = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + at, values.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, *, update: Tensor | None = None,
    picked: Tensor | None = None,
) -> None:  # fmt: skip
    """`out[i] = r / sqrt(mean(r^2) + eps) * weight`, r = x[i], or x[picked[i]].

    With `update` the row r = x[i] + update[i], rounded to x's type, is written back to x first.

    Args:
        x: [rows, hidden], any float type, contiguous: the residual.
        weight: [hidden].
        out: [n, hidden], any float type, contiguous; n is also the number of rows worked on.
        update: as x, any float type; not together with `picked`, whose rows may repeat.
        picked: int32 [n], rows of x.

    One program a row; lanes past `hidden` hold zero.
    """
    hidden = x.shape[1]
    block = power_of_two(hidden)
    launch(
        _rms_norm,
        (len(out),),
        {
            "x": x,
            "update": update,
            "weight": weight,
            "out": out,
            "picked": picked,
            "eps": eps,
            "hidden": hidden,
        },
        {"BLOCK": block, "ADD": update is not None, "PICK": picked is not None},
        warps=min(max(block // 512, 1), 16),
    )
