"""A step laid out for the GPU kernels: all integers in one array, which goes to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.plan import Slice
from baton_kernels.gpu.attention_plan import AttentionPlan, Run, plan_attention, plan_decodes
from baton_kernels.gpu.pages import PageShape

SPLIT = 512  # keys, at fixed absolute positions: part of the fingerprint


@dataclass(slots=True, frozen=True)
class StepLayout:
    """A step in host memory: numpy int32, in the shapes that the kernels take."""

    ids: np.ndarray  # [rows]
    positions: np.ndarray  # [rows]
    slots: np.ndarray  # [rows]; -1: padding
    tables: np.ndarray  # [sequences, blocks]
    plan: AttentionPlan
    sampled: np.ndarray  # [n]: rows whose logits are wanted

    def parts(self) -> list[np.ndarray]:
        """All of them, in the order that `StepTensors` has them in."""
        planned = (self.plan.tiles, self.plan.items, self.plan.merges)
        return [self.ids, self.positions, self.slots, self.tables, *planned, self.sampled]


@dataclass(slots=True, frozen=True)
class StepTensors:
    """The same on the device: views of one int32 tensor."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    tiles: Tensor
    items: Tensor
    merges: Tensor
    sampled: Tensor


def lay_out(
    slices: Sequence[Slice], sampled: Sequence[int], shape: PageShape, queries_per_kv: int
) -> StepLayout:
    """Any step: chunks and single tokens, in the plan's order.

    Args:
        sampled: the slices whose last token's logits are wanted.
    """
    runs, row = [], 0
    for number, part in enumerate(slices):
        runs.append(Run(row, len(part.tokens), part.start, number))
        row += len(part.tokens)
    width = max(len(part.blocks) for part in slices)
    tables = np.zeros((len(slices), width), dtype=np.int32)
    for number, part in enumerate(slices):
        tables[number, : len(part.blocks)] = part.blocks
    positions = np.concatenate([np.arange(run.start, run.start + run.length, dtype=np.int32) for run in runs])
    owners = np.repeat(np.arange(len(slices)), [run.length for run in runs])
    return StepLayout(
        ids=np.asarray([token for part in slices for token in part.tokens], dtype=np.int32),
        positions=positions,
        slots=tables[owners, positions // shape.block_size],
        tables=tables,
        plan=plan_attention(runs, queries_per_kv, SPLIT),
        sampled=np.asarray([runs[at].row + runs[at].length - 1 for at in sampled], dtype=np.int32),
    )


def lay_out_decodes(slices: Sequence[Slice], rows: int, splits: int, shape: PageShape) -> StepLayout:
    """Single tokens only, filled up to `rows` and `splits`: of one shape, so that a graph can be kept for it.

    All rows' logits are made; those past the slices are of padding.
    """
    used = len(slices)
    tables = np.zeros((rows, splits * SPLIT // shape.block_size), dtype=np.int32)
    ids, positions = np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
    slots = np.full(rows, -1, dtype=np.int32)
    plan = plan_decodes(rows, splits)
    plan.tiles[used:, 1] = 0
    for row, part in enumerate(slices):
        count = part.start // shape.block_size + 1
        tables[row, :count] = part.blocks[:count]
        ids[row], positions[row] = part.tokens[0], part.start
        slots[row] = part.blocks[count - 1]
    plan.tiles[:, 2] = positions
    return StepLayout(ids, positions, slots, tables, plan, np.arange(rows, dtype=np.int32))


def _places(layout: StepLayout) -> Iterator[tuple[np.ndarray, int]]:
    """Each part and where it begins: on 16 bytes, or Triton would compile for every other alignment too."""
    at = 0
    for part in layout.parts():
        yield part, at
        at += -(-part.size // 4) * 4


def size_of(layout: StepLayout) -> int:
    """How many integers it takes."""
    return max(at + part.size for part, at in _places(layout))


def fill(layout: StepLayout, host: Tensor) -> None:
    """Writes a layout to int32 `host` [>= size_of(layout)]."""
    flat = host.numpy()
    for part, at in _places(layout):
        flat[at : at + part.size] = part.ravel()


def views(layout: StepLayout, device: Tensor) -> StepTensors:
    """The parts of a copy on the device."""
    return StepTensors(*(device[at : at + part.size].view(part.shape) for part, at in _places(layout)))


def pinned(count: int, device: torch.device) -> Tensor:
    """int32 [count] in host memory that a GPU can read while the host goes on."""
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
