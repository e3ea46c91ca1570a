"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), fused with the write of K and V to pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.eight_bit import to_e4m3, to_int8
from baton_kernels.gpu.launch import launch, power_of_two
from baton_kernels.gpu.pages import Pages

LARGEST = {"float32": 3.4028234663852886e38, "float16": 65_504.0, "bfloat16": 3.3895313892515355e38}


@triton.jit
def _store(first, second, values, scales, at, scale_at, half, inside, largest, FORMAT: tl.constexpr):
    """A vector, in its halves, to a page; NaN becomes 0 and what is too large is held."""
    first = tl.where(first == first, tl.minimum(tl.maximum(first, -largest), largest), 0.0)
    second = tl.where(second == second, tl.minimum(tl.maximum(second, -largest), largest), 0.0)
    lane = tl.arange(0, inside.shape[0])
    if FORMAT == "int8" or FORMAT == "fp8":
        peak = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        top = 127.0 if FORMAT == "int8" else 448.0
        scale = tl.maximum(tl.math.div_rn(peak, top), 1e-30)
        first, second = tl.math.div_rn(first, scale), tl.math.div_rn(second, scale)
        if FORMAT == "int8":
            tl.store(values + at + lane, to_int8(first), mask=inside)
            tl.store(values + at + half + lane, to_int8(second), mask=inside)
        else:
            tl.store(values + at + lane, to_e4m3(first), mask=inside)
            tl.store(values + at + half + lane, to_e4m3(second), mask=inside)
        tl.store(scales + scale_at, scale)
    else:
        tl.store(values + at + lane, first.to(values.dtype.element_ty), mask=inside)
        tl.store(values + at + half + lane, second.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _rope_write(
    qkv, cos, sin, positions, slots, values, scales,
    heads, kv_heads, half, layer, block_size, block_values, block_floats, first_scale, largest,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < half
    source = qkv + (row * (heads + 2 * kv_heads) + head) * 2 * half
    first = tl.load(source + lane, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + lane, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + row)
    if head < heads + kv_heads:
        c = tl.load(cos + position.to(tl.int64) * half + lane, mask=inside, other=0.0)
        s = tl.load(sin + position.to(tl.int64) * half + lane, mask=inside, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    if head < heads:
        tl.store(source + lane, first.to(qkv.dtype.element_ty), mask=inside)
        tl.store(source + half + lane, second.to(qkv.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            vector = (layer * 2 * kv_heads + head - heads) * block_size + position % block_size
            at = slot * block_values + vector.to(tl.int64) * 2 * half
            scale_at = slot * block_floats + first_scale + vector
            _store(first, second, values, scales, at, scale_at, half, inside, largest, FORMAT)


def rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, pages: Pages, layer: int
) -> None:
    """Rotates queries in place; rotates keys and writes them, and values, to their pages.

    Dimension i turns with dimension i + head_dim / 2. Every kind of RoPE scaling is in the tables.

    Args:
        qkv: [rows, (heads + 2 * kv_heads) * head_dim], any float type, contiguous: queries, keys, values.
        cos, sin: float32 [positions, head_dim / 2].
        positions: int32 [rows], absolute.
        slots: int32 [rows], the block that each row's K and V belong to; negative: not written.
        pages: the pool. 8-bit formats get a scale a token and head, the largest value at 127 or 448.
        layer: which of a block's layers.

    One program a row and head; lanes past head_dim / 2 are neither read nor written.
    """
    shape = pages.shape
    half = shape.head_dim // 2
    all_heads = qkv.shape[1] // shape.head_dim
    args = {
        "qkv": qkv, "cos": cos, "sin": sin, "positions": positions, "slots": slots,
        "values": pages.values, "scales": pages.scales,
        "heads": all_heads - 2 * shape.kv_heads, "kv_heads": shape.kv_heads, "half": half, "layer": layer,
        "block_size": shape.block_size, "block_values": pages.block_values,
        "block_floats": pages.block_floats, "first_scale": pages.first_scale,
        "largest": LARGEST.get(shape.format, 1e30),
    }  # fmt: skip
    constants = {"BLOCK": power_of_two(half), "FORMAT": shape.format}
    launch(_rope_write, (len(qkv), all_heads), args, constants, warps=1)
