"""Cutting a step's queries into tiles, and tiles into the work of single programs. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TILE_ROWS = 64  # of every tile, whatever is in it: query heads of one KV head times queries
ALL = -1  # instead of a split: a program goes through all of them

Ints = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """What the attention kernels read about a step.

    Attributes:
        tiles: int32 [tiles, 4]: first row of the step, rows, position of the first, row of the block tables.
        items: int32 [items, 2]: tile, and split or `ALL`. A program and KV head each.
        merges: int32 [merges, 2]: tile, and its first item; the others follow that one.
    """

    tiles: Ints
    items: Ints
    merges: Ints


@dataclass(slots=True, frozen=True)
class Run:
    """Consecutive rows of a step that belong to one sequence."""

    row: int  # of the step
    length: int  # rows
    start: int  # absolute position of the first
    table: int  # row of the block tables


def plan_attention(runs: Sequence[Run], queries_per_kv: int, split: int) -> AttentionPlan:
    """Tiles of up to `TILE_ROWS // queries_per_kv` queries of a sequence.

    Single queries have a program for each split and a merge at the end; tiles of chunks, of which there are
    many, go through their splits in one program. Both give the same bits.

    Args:
        queries_per_kv: query heads that share a KV head; at most `TILE_ROWS`.
        split: keys in a split.
    """
    most = TILE_ROWS // queries_per_kv
    tiles: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    for run in runs:
        for at in range(0, run.length, most):
            length = min(most, run.length - at)
            start = run.start + at
            splits = -(-(start + length) // split)
            if run.length == 1 and splits > 1:
                merges.append((len(tiles), len(items)))
                items += [(len(tiles), number) for number in range(splits)]
            else:
                items.append((len(tiles), ALL))
            tiles.append((run.row + at, length, start, run.table))
    return AttentionPlan(_table(tiles, 4), _table(items, 2), _table(merges, 2))


def plan_decodes(rows: int, splits: int) -> AttentionPlan:
    """A plan for `rows` single queries of up to `splits` splits each, which a captured graph keeps.

    The positions in `tiles` are filled in later; programs for splits past a sequence's end return at once.
    """
    tiles = [(row, 1, 0, row) for row in range(rows)]
    if splits == 1:
        return AttentionPlan(_table(tiles, 4), _table([(row, ALL) for row in range(rows)], 2), _table([], 2))
    items = [(row, number) for row in range(rows) for number in range(splits)]
    merges = [(row, row * splits) for row in range(rows)]
    return AttentionPlan(_table(tiles, 4), _table(items, 2), _table(merges, 2))


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    return np.asarray(rows, dtype=np.int32).reshape(-1, width)
