"""Linear layers: `x @ weight.T + bias`, with weights of 16 or 32 bits, or of 8 or 4 bits kept that way.

The tiles' configuration is chosen by the weight's shape, format and GPU, never by the number of rows, and one
program sums all of K in order: no split-K. So a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.eight_bit import e4m3_over_256
from baton_kernels.gpu.launch import launch
from baton_kernels.gpu.quantise import RUN, Weight
from baton_kernels.gpu.tiles import Tiles


@triton.jit
def _four_bits(x_low, x_high, low, high, scales, lows, precision: tl.constexpr, acc):
    """Adds a tile of 4-bit weights: two halves of each run, [BM, BK / 2] by [BK / 2, BN]."""
    low_weights = (low.to(tl.float32) * scales + lows).to(x_low.dtype)
    acc = tl.dot(x_low, low_weights, acc, input_precision=precision)
    high_weights = (high.to(tl.float32) * scales + lows).to(x_low.dtype)
    return tl.dot(x_high, high_weights, acc, input_precision=precision)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, scales, lows, bias, out, rows, N, K, x_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0)
    row = (tile % row_tiles) * BM + tl.arange(0, BM)
    column = (tile // row_tiles) * BN + tl.arange(0, BN)
    real_row, real_column = row < rows, column < N
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BM, BN), tl.float32)
    if FORMAT == "int4":
        HALF: tl.constexpr = RUN // 2
        byte = tl.arange(0, BK // 2)
        place = (byte // HALF) * RUN + byte % HALF  # of a low half, in the tile
        w_row = weight + column.to(tl.int64)[None, :] * (K // 2)
        group_row = column.to(tl.int64)[None, :] * (K // GROUP)
        for k in range(0, K, BK):
            real = k + place < K
            x_real = real_row[:, None] & real[None, :]
            x_low = tl.load(x_row + (k + place)[None, :], mask=x_real, other=0.0)
            x_high = tl.load(x_row + (k + place + HALF)[None, :], mask=x_real, other=0.0)
            w_real = real[:, None] & real_column[None, :]
            packed = tl.load(w_row + (k // 2 + byte)[:, None], mask=w_real, other=0)
            group = group_row + ((k + place) // GROUP)[:, None]
            step = tl.load(scales + group, mask=w_real, other=0.0).to(tl.float32)
            low = tl.load(lows + group, mask=w_real, other=0.0).to(tl.float32)
            acc = _four_bits(x_low, x_high, packed & 0xF, packed >> 4, step, low, PRECISION, acc)
    else:
        inner = tl.arange(0, BK)
        w_row = weight + column.to(tl.int64)[None, :] * K
        for k in range(0, K, BK):
            real = k + inner < K
            tile_x = tl.load(x_row + (k + inner)[None, :], mask=real_row[:, None] & real[None, :], other=0.0)
            raw = tl.load(w_row + (k + inner)[:, None], mask=real[:, None] & real_column[None, :], other=0)
            if FORMAT == "fp8":
                raw = e4m3_over_256(raw)
            if FORMAT != "plain":
                raw = raw.to(tl.float32).to(tile_x.dtype)
            acc = tl.dot(tile_x, raw, acc, input_precision=PRECISION)
        if FORMAT == "int8" or FORMAT == "fp8":
            unit = 1.0 if FORMAT == "int8" else 256.0
            acc *= (tl.load(scales + column, mask=real_column, other=0.0) * unit)[None, :]
    if BIAS:
        acc += tl.load(bias + column, mask=real_column, other=0.0).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])


def linear(x: Tensor, weight: Weight, out: Tensor, tiles: Tiles, *, bias: Tensor | None = None) -> None:
    """`out = x @ weight.T + bias`, summed in float32.

    Args:
        x: [rows, K], float32, float16 or bfloat16; the last dimension contiguous.
        weight: N x K, see `quantise`. Plain weights are of x's type.
        out: [rows, N], any float type, contiguous.
        bias: [N], any float type.

    Masked with zeros: rows, columns and depth past the matrices' own.
    """
    rows, inner = x.shape
    columns = out.shape[1]
    args = {
        "x": x, "weight": weight.values, "scales": weight.scales, "lows": weight.lows, "bias": bias,
        "out": out, "rows": rows, "N": columns, "K": inner, "x_stride": x.stride(0),
    }  # fmt: skip
    constants = {
        "FORMAT": weight.format, "GROUP": weight.group, "RUN": RUN, "BIAS": bias is not None,
        "BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "PRECISION": "ieee",
    }  # fmt: skip
    grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns),)
    launch(_linear, grid, args, constants, warps=tiles.warps, stages=tiles.stages)
