"""Causal attention over paged keys and values, for decodes and chunks alike.

Flash-decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) with splits at fixed absolute
positions: a query's weights and weighted values are summed a split, then the splits' sums in a fixed tree.
So a query's bits follow from its own keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.attention_plan import SPLIT, Group, Tile, Tree
from baton_kernels.kv_write import Page

# Below it torch's `exp` underflows, which takes it 8 to 20 times as long (measured); e^-87 is 2e-38.
LOWEST = -87.0


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
    splits, kv_heads, rows, head_dim = tile.packed.shape
    flat = splits * kv_heads
    _pack(queries, tile)
    transposed = keys[:splits].view(flat, SPLIT, head_dim).transpose(1, 2)
    weights = torch.bmm(tile.packed.view(flat, rows, head_dim), transposed).view(
        splits, kv_heads, rows, SPLIT
    )
    masked = weights[tile.masked_from :]
    masked.add_(tile.mask)
    weights.sub_(_peaks(weights, tile)).clamp_(min=LOWEST).exp_()
    masked.mul_(tile.seen)
    totals, sums = tile.totals[:splits], tile.sums[:splits]
    torch.sum(weights, -1, keepdim=True, out=totals)
    pieces = values[:splits].view(flat, SPLIT, head_dim)
    torch.bmm(weights.view(flat, rows, SPLIT), pieces, out=sums.view(flat, rows, head_dim))
    if tile.tree is not None:
        totals, sums = (_halve(x, tile.tree) for x in (tile.totals, tile.sums))
    return _unpack(sums / totals, tile, queries.shape[1])


def _pack(queries: Tensor, tile: Tile) -> None:
    """Scaled queries into `tile.packed`, by KV head, once for each piece of keys they look at."""
    _, heads, head_dim = queries.shape
    splits, kv_heads = tile.packed.shape[:2]
    group = heads // kv_heads
    place = tile.packed[:, :, : tile.length * group].view(splits, kv_heads, tile.length, group, head_dim)
    given = queries.view(tile.sequences, tile.length, kv_heads, group, head_dim)
    if tile.of_split is not None:
        given = given.index_select(0, tile.of_split)
    torch.mul(given.permute(0, 2, 1, 3, 4).expand(place.shape), head_dim**-0.5, out=place)


def _peaks(scores: Tensor, tile: Tile) -> Tensor:
    """Each query's largest score over all its pieces, for each of them: [splits or 1, kv_heads, rows, 1]."""
    peaks = scores.amax(-1, keepdim=True)
    if tile.tree is None:
        return peaks
    table = peaks.index_select(0, tile.tree.own).view(tile.tree.depth, tile.sequences, *peaks.shape[1:])
    largest = table.amax(0)
    return largest if tile.of_split is None else largest.index_select(0, tile.of_split)


def _halve(pieces: Tensor, tree: Tree) -> Tensor:
    """Sums of each sequence's pieces, in the tree's order: [sequences, kv_heads, rows, n]."""
    table = pieces.index_select(0, tree.or_zero).view(tree.depth, -1, *pieces.shape[1:])
    depth = tree.depth
    while depth > 1:
        depth //= 2
        table = table.view(depth, 2, *table.shape[1:])
        table = table[:, 0] + table[:, 1]
    return table[0]


def _unpack(mixed: Tensor, tile: Tile, heads: int) -> Tensor:
    """[sequences, kv_heads, gemm_rows, head_dim] back to [sequences * length, heads * head_dim]."""
    sequences, kv_heads, _, head_dim = mixed.shape
    group = heads // kv_heads
    used = mixed[:, :, : tile.length * group].view(sequences, kv_heads, tile.length, group, head_dim)
    return used.permute(0, 2, 1, 3, 4).reshape(sequences * tile.length, heads * head_dim)
