"""Causal attention over paged keys and values, for decodes and chunks alike.

Flash-decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) with splits at fixed absolute
positions: a query's scores, their maximum and sum, and the weighted values are formed a split, then combined
in a fixed tree. So a query's bits follow from its own keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.attention_plan import SPLIT, Group, Tile
from baton_kernels.kv_write import Page


def paged_attention(
    queries: Tensor, pool: Tensor, layer: int, page: Page, groups: Sequence[Group], out: Tensor
) -> None:
    """Attends each query to all positions up to its own.

    Args:
        queries: float32 [rows, heads, head_dim], RoPE applied; any strides.
        pool: [slots * layers, 2 * kv_heads * block_size * head_dim] of the KV dtype: a layer's part a row.
        layer: which of a page's layers.
        page: a block's shape.
        groups: from `plan_attention`.
        out: float32 [rows, heads * head_dim]: rows of the step are written, others left alone.
    """
    for group in groups:
        keys, values = _gather(pool, group.pages + layer, page)
        for tile in group.tiles:
            rows = slice(tile.row, tile.row + tile.sequences * tile.length)
            out[rows] = _attend(queries[rows], keys, values, tile)


def _gather(pool: Tensor, pages: Tensor, page: Page) -> tuple[Tensor, Tensor]:
    """Keys and values of whole splits, float32 [splits, kv_heads, SPLIT, head_dim] each."""
    _, _, kv_heads, block_size, head_dim = page
    each = SPLIT // block_size
    stored = pool.index_select(0, pages).view(-1, each, 2, kv_heads, block_size, head_dim)
    both = torch.empty(2, len(stored), kv_heads, each, block_size, head_dim)
    both.copy_(stored.permute(2, 0, 3, 1, 4, 5))
    keys, values = both.view(2, len(stored), kv_heads, SPLIT, head_dim)
    return keys, values


def _attend(queries: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
    """One tile: queries float32 [rows, heads, head_dim], result [rows, heads * head_dim]."""
    splits, rows = tile.splits, tile.gemm_rows
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    packed = _pack(queries, tile, kv_heads)
    if tile.of_split is not None:
        packed = packed.index_select(0, tile.of_split)
    elif splits > 1:
        packed = packed.expand(splits, -1, -1, -1)
    flat = splits * kv_heads
    transposed = keys[:splits].reshape(flat, SPLIT, head_dim).transpose(1, 2)
    weights = torch.bmm(packed.reshape(flat, rows, head_dim), transposed)
    weights.view(splits, kv_heads, rows, SPLIT)[tile.masked_from :] += tile.mask
    peak = weights.amax(-1, keepdim=True)
    weights.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    sums = torch.bmm(weights, values[:splits].reshape(flat, SPLIT, head_dim))
    shape = (splits, kv_heads, rows, -1)
    if tile.tree is None or tile.absent is None:
        mixed = sums.div_(total).view(shape)
    else:
        mixed = _combine(peak.view(shape), total.view(shape), sums.view(shape), tile.tree, tile.absent)
    return _unpack(mixed, tile, queries.shape[1])


def _pack(queries: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """Scaled queries by KV head, [sequences, kv_heads, gemm_rows, head_dim], zero where padded."""
    _, heads, head_dim = queries.shape
    group = heads // kv_heads
    used = tile.length * group
    packed = torch.zeros(tile.sequences, kv_heads, tile.gemm_rows, head_dim)
    place = packed[:, :, :used].view(tile.sequences, kv_heads, tile.length, group, head_dim)
    given = queries.view(tile.sequences, tile.length, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    torch.mul(given, head_dim**-0.5, out=place)
    return packed


def _unpack(mixed: Tensor, tile: Tile, heads: int) -> Tensor:
    """[sequences, kv_heads, gemm_rows, head_dim] back to [sequences * length, heads * head_dim]."""
    sequences, kv_heads, _, head_dim = mixed.shape
    group = heads // kv_heads
    used = mixed[:, :, : tile.length * group].view(sequences, kv_heads, tile.length, group, head_dim)
    return used.permute(0, 2, 1, 3, 4).reshape(sequences * tile.length, heads * head_dim)


def _combine(peak: Tensor, total: Tensor, sums: Tensor, tree: Tensor, absent: Tensor) -> Tensor:
    """Softmax-weighted means out of the splits': [sequences, kv_heads, rows, head_dim].

    peak and total are [splits, kv_heads, rows, 1], sums [splits, kv_heads, rows, head_dim].
    """
    depth, sequences = absent.shape[:2]

    def arrange(x: Tensor) -> Tensor:
        return x.index_select(0, tree).view(depth, sequences, *x.shape[1:])

    peaks = arrange(peak).add_(absent)
    scale = peaks.sub_(peaks.amax(0, keepdim=True)).exp_()
    totals = arrange(total).mul_(scale)
    mixed = arrange(sums).mul_(scale)
    while depth > 1:
        totals = totals[0::2] + totals[1::2]
        mixed = mixed[0::2] + mixed[1::2]
        depth //= 2
    return mixed[0].div_(totals[0])
