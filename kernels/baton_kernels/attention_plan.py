"""What attention needs to know about a step, worked out once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton_kernels.kv_write import Page
from baton_kernels.rows import padded

# Keys are split at multiples of this many positions, whatever the sequence, chunk or batch.
SPLIT = 64
# Queries of one chunk that are worked on at once: what lies after the last of them is not looked at.
TILE = 64
# Added to the score of a key that must not be seen; finite, so that a split without any gives no NaN.
HIDDEN = -1e30


@dataclass(slots=True, frozen=True)
class Span:
    """Consecutive rows of a step that belong to one sequence."""

    row: int  # of the step
    length: int  # rows
    start: int  # absolute position of the first
    blocks: Sequence[int]  # pool slots, covering positions [0, start + length)


@dataclass(slots=True, frozen=True)
class Tile:
    """Queries worked on together: `length` rows of each of `sequences` sequences.

    `packed`, `sums` and `totals` are scratch that every layer writes anew; what is zero in them from the
    start (padding rows, the last piece) stays zero.
    """

    row: int  # first row of the step
    sequences: int
    length: int
    splits: int  # pieces of keys taken from the gathered ones
    of_split: Tensor | None  # int64 [splits]: the sequence of each piece; None: one sequence
    masked_from: int  # pieces before this one are seen whole
    mask: Tensor  # float32 [splits - masked_from, 1, gemm_rows or 1, SPLIT]: 0 or HIDDEN
    seen: Tensor  # the same shape: 1 or 0
    tree: Tree | None  # None: each sequence has one piece
    packed: Tensor  # float32 [splits, kv_heads, gemm_rows, head_dim]: queries
    sums: Tensor  # float32 [splits + 1, kv_heads, gemm_rows, head_dim]: weighted values
    totals: Tensor  # float32 [splits + 1, kv_heads, gemm_rows, 1]: sums of weights


@dataclass(slots=True, frozen=True)
class Tree:
    """Pieces by [position, sequence], as deep as a power of two.

    Halving such a table sums a sequence's pieces in one order, however deep it is: what is added beyond its
    own pieces is exactly zero.
    """

    depth: int
    own: Tensor  # int64 [depth * sequences]: a sequence's pieces; its first again where it has no more
    or_zero: Tensor  # int64 [depth * sequences]: its pieces; the zero piece where it has no more


@dataclass(slots=True, frozen=True)
class Group:
    """Sequences whose pages are gathered together, and the tiles that look at them."""

    pages: Tensor  # int64 [splits * SPLIT / block_size]: pool slot * layers, in order of the pieces
    tiles: list[Tile]


def plan_attention(spans: Sequence[Span], page: Page, queries_per_kv: int) -> list[Group]:
    """Groups for a step: its single rows together, each longer span by itself.

    Args:
        spans: in the order of their rows; those of length 1 come first.
        page: a block's shape.
        queries_per_kv: query heads that share a KV head.
    """
    singles = [span for span in spans if span.length == 1]
    groups = [_group_of_singles(singles, page, queries_per_kv)] if singles else []
    return groups + [_group_of_chunk(span, page, queries_per_kv) for span in spans[len(singles) :]]


def _group_of_singles(spans: Sequence[Span], page: Page, queries_per_kv: int) -> Group:
    counts = np.array([-(-(span.start + 1) // SPLIT) for span in spans])
    firsts = np.concatenate([[0], np.cumsum(counts)])
    total = int(firsts[-1])
    owner = np.repeat(np.arange(len(spans)), counts)
    key = (np.arange(total) - firsts[owner])[:, None] * SPLIT + np.arange(SPLIT)
    starts = np.array([span.start for span in spans])
    visible = key <= starts[owner][:, None]
    mask = np.where(visible, 0.0, HIDDEN).astype(np.float32)
    packed, sums, totals = _scratch(total, padded(queries_per_kv, "bmm_fp32"), page)
    tile = Tile(
        row=spans[0].row,
        sequences=len(spans),
        length=1,
        splits=total,
        of_split=torch.from_numpy(owner) if len(spans) > 1 else None,
        masked_from=0,
        mask=torch.from_numpy(mask).view(total, 1, 1, SPLIT),
        seen=torch.from_numpy(visible).view(total, 1, 1, SPLIT).float(),
        tree=_tree(counts, firsts),
        packed=packed,
        sums=sums,
        totals=totals,
    )
    pages = np.concatenate(
        [_pages(span, int(count), page) for span, count in zip(spans, counts, strict=True)]
    )
    return Group(torch.from_numpy(pages), [tile])


def _group_of_chunk(span: Span, page: Page, queries_per_kv: int) -> Group:
    tiles = []
    for begin in range(0, span.length, TILE):
        length = min(TILE, span.length - begin)
        start = span.start + begin
        splits = -(-(start + length) // SPLIT)
        masked_from = (start + 1) // SPLIT
        gemm_rows = padded(length * queries_per_kv, "bmm_fp32")
        query = start + np.minimum(np.arange(gemm_rows) // queries_per_kv, length - 1)
        key = np.arange(masked_from * SPLIT, splits * SPLIT).reshape(-1, 1, SPLIT)
        visible = key <= query[:, None]
        mask = np.where(visible, 0.0, HIDDEN).astype(np.float32)
        packed, sums, totals = _scratch(splits, gemm_rows, page)
        tile = Tile(
            row=span.row + begin,
            sequences=1,
            length=length,
            splits=splits,
            of_split=None,
            masked_from=masked_from,
            mask=torch.from_numpy(mask).unsqueeze(1),
            seen=torch.from_numpy(visible).unsqueeze(1).float(),
            tree=_tree(np.array([splits]), np.array([0])),
            packed=packed,
            sums=sums,
            totals=totals,
        )
        tiles.append(tile)
    splits = -(-(span.start + span.length) // SPLIT)
    return Group(torch.from_numpy(_pages(span, splits, page)), tiles)


def _pages(span: Span, splits: int, page: Page) -> np.ndarray:
    """Slots that fill `splits` pieces; past the end the first one stands in, masked."""
    layers, _, _, block_size, _ = page
    used = -(-(span.start + span.length) // block_size)
    slots = np.full(splits * SPLIT // block_size, span.blocks[0], dtype=np.int64)
    slots[:used] = span.blocks[:used]
    return slots * layers


def _tree(counts: np.ndarray, firsts: np.ndarray) -> Tree | None:
    """The tree of sequences with `counts` pieces each, from `firsts` on."""
    deepest = int(counts.max())
    if deepest == 1:
        return None
    depth = 1 << (deepest - 1).bit_length()
    position = np.arange(depth)[:, None]
    here = position < counts
    first = firsts[: len(counts)]
    own = np.where(here, first + position, first)
    or_zero = np.where(here, own, counts.sum())
    return Tree(depth, torch.from_numpy(own.flatten()), torch.from_numpy(or_zero.flatten()))


def _scratch(splits: int, gemm_rows: int, page: Page) -> tuple[Tensor, Tensor, Tensor]:
    """`packed`, `sums` and `totals` of a tile."""
    _, _, kv_heads, _, head_dim = page
    return (
        torch.zeros(splits, kv_heads, gemm_rows, head_dim),
        torch.zeros(splits + 1, kv_heads, gemm_rows, head_dim),
        torch.zeros(splits + 1, kv_heads, gemm_rows, 1),
    )
