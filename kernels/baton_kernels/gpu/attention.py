"""Causal attention over paged keys and values: decodes and chunks in one launch.

FlashAttention's running softmax (Dao 2023, arXiv:2307.08691) inside splits of the keys at fixed absolute
positions (flash-decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A program takes a tile of
queries of one sequence and KV head, through one split or through all; either way a split begins from nothing
and is merged to those before it by `softmax.merge`, so a query's bits follow from its own keys alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.attention_plan import TILE_ROWS
from baton_kernels.gpu.eight_bit import e4m3_over_256
from baton_kernels.gpu.launch import launch, power_of_two
from baton_kernels.gpu.pages import Pages
from baton_kernels.gpu.softmax import HIDDEN, LOG2E, capped, finish, merge


@triton.jit
def _stored(raw, like: tl.constexpr, FORMAT: tl.constexpr):
    """Values of a page as the matrix unit takes them; what a scale makes up for is left to it."""
    if FORMAT == "fp8":
        raw = e4m3_over_256(raw)
    return raw.to(tl.float32).to(like)


@triton.jit
def _one_split(
    q, position, used, values, scales, table, kv_head, first_key, end_key,
    scale, cap, window, layer, kv_heads, head_dim, block_size, block_values, block_floats, first_scale,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `first_key` to `end_key`: peak [BM], total [BM], mixed [BM, BD]."""
    peak = tl.full((BM,), HIDDEN, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BD), tl.float32)
    dim = tl.arange(0, BD)
    lane = tl.arange(0, BN)
    for at in range(first_key, end_key, BN):
        key = at + lane
        here = key < end_key
        slot = tl.load(table + key // block_size, mask=here, other=0).to(tl.int64)
        vector = (layer * 2 * kv_heads + kv_head) * block_size + key % block_size
        place = slot * block_values + vector.to(tl.int64) * head_dim
        full = here[:, None] & (dim[None, :] < head_dim)
        k = _stored(tl.load(values + place[:, None] + dim[None, :], mask=full, other=0), q.dtype, FORMAT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if FORMAT == "int8" or FORMAT == "fp8":
            unit = 1.0 if FORMAT == "int8" else 256.0
            scale_at = slot * block_floats + first_scale + vector
            scores *= (tl.load(scales + scale_at, mask=here, other=0.0) * unit)[None, :]
        scores *= scale
        if CAP:
            scores = capped(scores, cap)
        scores *= LOG2E
        seen = (key[None, :] <= position[:, None]) & used[:, None] & here[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        highest = tl.maximum(peak, tl.max(tl.where(seen, scores, HIDDEN), 1))
        weights = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0)
        shrunk = tl.exp2(peak - highest)
        total = total * shrunk + tl.sum(weights, 1)
        values_at = place + (kv_heads * block_size).to(tl.int64) * head_dim
        v = _stored(tl.load(values + values_at[:, None] + dim[None, :], mask=full, other=0), q.dtype, FORMAT)
        if FORMAT == "int8" or FORMAT == "fp8":
            scale_at = slot * block_floats + first_scale + vector + kv_heads * block_size
            weights *= (tl.load(scales + scale_at, mask=here, other=0.0) * unit)[None, :]
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = highest
    return peak, total, mixed


@triton.jit(do_not_specialize=["table_width", "layer"])
def _attention(
    queries, values, scales, tables, tiles, items, sinks, out, parts, part_stats,
    query_stride, table_width, scale, cap, window, layer,
    heads, kv_heads, head_dim, block_size, block_values, block_floats, first_scale,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FORMAT: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item, kv_head = tl.program_id(0), tl.program_id(1)
    tile, split = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    row, length = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    start, table_row = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    end = start + length
    if split * SPLIT >= end or length == 0:  # a graph has programs for splits that a sequence lacks
        return
    group = heads // kv_heads
    lane, dim = tl.arange(0, BM), tl.arange(0, BD)
    used = lane < length * group
    position = start + lane // group
    head = kv_head * group + lane % group
    query_row = (row + lane // group).to(tl.int64)
    inside = used[:, None] & (dim[None, :] < head_dim)
    at = query_row[:, None] * query_stride + (head * head_dim)[:, None] + dim[None, :]
    q = tl.load(queries + at, mask=inside, other=0.0)
    table = tables + table_row.to(tl.int64) * table_width
    first = 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0) // SPLIT
    last = (end - 1) // SPLIT + 1
    if split >= 0:
        first, last = tl.maximum(first, split), split + 1
    peak = tl.full((BM,), HIDDEN, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BD), tl.float32)
    for number in range(first, last):
        next_peak, next_total, next_mixed = _one_split(
            q, position, used, values, scales, table, kv_head, number * SPLIT, min((number + 1) * SPLIT, end),
            scale, cap, window, layer, kv_heads, head_dim, block_size, block_values, block_floats,
            first_scale, BD, BM, BN, FORMAT, CAP, WINDOW, PRECISION,
        )  # fmt: skip
        peak, total, mixed = merge(peak, total, mixed, next_peak, next_total, next_mixed)
    if split < 0:
        sink = tl.zeros((BM,), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0)
        mixed = finish(peak, total, mixed, sink, SINKS)
        to = query_row[:, None] * heads * head_dim + (head * head_dim)[:, None] + dim[None, :]
        tl.store(out + to, mixed.to(out.dtype.element_ty), mask=inside)
    else:
        part = (item * kv_heads + kv_head).to(tl.int64) * group + lane
        first_query = lane < group
        tl.store(part_stats + 2 * part, peak, mask=first_query)
        tl.store(part_stats + 2 * part + 1, total, mask=first_query)
        where = first_query[:, None] & (dim[None, :] < head_dim)
        tl.store(parts + part[:, None] * head_dim + dim[None, :], mixed, mask=where)


@triton.jit
def _merge_splits(
    tiles, merges, sinks, out, parts, part_stats, heads, kv_heads, head_dim,
    SPLIT: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    number, kv_head = tl.program_id(0), tl.program_id(1)
    tile, item = tl.load(merges + 2 * number), tl.load(merges + 2 * number + 1)
    row, length = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 2) + length
    if length == 0:
        return
    group = heads // kv_heads
    lane, dim = tl.arange(0, BG), tl.arange(0, BD)
    used = lane < group
    inside = used[:, None] & (dim[None, :] < head_dim)
    peak = tl.full((BG,), HIDDEN, tl.float32)
    total = tl.zeros((BG,), tl.float32)
    mixed = tl.zeros((BG, BD), tl.float32)
    for each in range(item, item + (end - 1) // SPLIT + 1):
        part = (each * kv_heads + kv_head).to(tl.int64) * group + lane
        next_peak = tl.load(part_stats + 2 * part, mask=used, other=HIDDEN)
        next_total = tl.load(part_stats + 2 * part + 1, mask=used, other=0.0)
        next_mixed = tl.load(parts + part[:, None] * head_dim + dim[None, :], mask=inside, other=0.0)
        peak, total, mixed = merge(peak, total, mixed, next_peak, next_total, next_mixed)
    head = kv_head * group + lane
    sink = tl.zeros((BG,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0)
    mixed = finish(peak, total, mixed, sink, SINKS)
    to = row.to(tl.int64) * heads * head_dim + (head * head_dim)[:, None] + dim[None, :]
    tl.store(out + to, mixed.to(out.dtype.element_ty), mask=inside)


def paged_attention(
    queries: Tensor, pages: Pages, layer: int, tables: Tensor, tiles: Tensor, items: Tensor, merges: Tensor,
    parts: Tensor, part_stats: Tensor, out: Tensor, *,
    split: int, cap: float = 0.0, window: int = 0, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Attends each query to all positions up to its own, or to the last `window` of them.

    Args:
        queries: [rows, >= heads * head_dim], rotated, float32, float16 or bfloat16; rows of any stride.
        pages: the pool; `layer` is one of its blocks' layers. Values not of 8 bits are of the queries' type.
        tables: int32 [sequences, n], each sequence's blocks in order.
        tiles, items, merges: int32, from `attention_plan`.
        parts: float32 [items, heads, head_dim], part_stats: float32 [items, heads, 2]: scratch.
        out: [rows, heads * head_dim], contiguous; rows in no tile are left alone.
        split: keys in a split; must be the one planned with. Another split is another rounding.
        cap: soft cap of the scores; 0: none.
        sinks: float32 [heads], or None: a score a head that takes weight and gives nothing.

    Masked: keys after a query's own position, before its window, or past the sequence; padding rows of
    a tile; lanes past head_dim.
    """
    shape = pages.shape
    heads = out.shape[1] // shape.head_dim
    sizes = {"heads": heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    shared = {"tiles": tiles, "sinks": sinks, "out": out, "parts": parts, "part_stats": part_stats, **sizes}
    width = max(power_of_two(shape.head_dim), 16)
    constants = {"SPLIT": split, "BD": width, "SINKS": sinks is not None}
    args = {
        "queries": queries, "values": pages.values, "scales": pages.scales, "tables": tables, "items": items,
        "query_stride": queries.stride(0), "table_width": tables.shape[1], "layer": layer,
        "scale": shape.head_dim**-0.5, "cap": cap, "window": window, "block_size": shape.block_size,
        "block_values": pages.block_values, "block_floats": pages.block_floats,
        "first_scale": pages.first_scale,
    }  # fmt: skip
    # By type and head size alone: they change bits, and must not follow the batch.
    exact = queries.dtype == torch.float32
    keys, warps = (32, 8) if exact else (64, 8 if width > 128 else 4)
    precise = {
        "BM": TILE_ROWS, "BN": keys, "FORMAT": shape.format, "CAP": cap > 0, "WINDOW": window > 0,
        "PRECISION": "ieee",
    }  # fmt: skip
    grid = (len(items), shape.kv_heads)
    launch(_attention, grid, {**shared, **args}, {**constants, **precise}, warps=warps, stages=2)
    group = power_of_two(heads // shape.kv_heads)
    grid = (len(merges), shape.kv_heads)
    launch(_merge_splits, grid, {**shared, "merges": merges}, {**constants, "BG": group})
