"""A plan's slices as the arrays that one native call takes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.plan import Slice
from baton.kvcache.pool import KvPool
from baton.runner.native_ops import RopeTable
from baton_kernels.cpu.library import STEP, CStep

Floats = npt.NDArray[np.float32]


_NO_CHOICES = (0,) * 6


class StepArrays:
    """Lays out steps. What it hands out is good until the next call."""

    def __init__(self, rope: RopeTable, logits_stride: int) -> None:
        self._rope = rope
        self._stride = logits_stride
        self._logits: Floats = np.empty((1, logits_stride), dtype=np.float32)
        self._logits_at = self._logits.ctypes.data  # addresses are kept: numpy takes microseconds to tell one
        self._record = bytearray(STEP.size)
        self._step = CStep.from_buffer(self._record)
        self._kept = array("i")  # what the pointers of the last step name

    def lay_out(
        self, slices: Sequence[Slice], wanted: Sequence[int] | None, pool: KvPool
    ) -> tuple[CStep, Floats]:
        """
        Args:
            wanted: which slices' last tokens' logits are wanted; None: those of every token.

        Returns:
            The step, and where its logits will be: float32 [wanted or all tokens, stride].
        """
        block_size = pool.geometry.block_size
        ids: list[int] = []
        spans: list[int] = []
        tables: list[int] = []
        last: list[int] = []
        furthest = 0
        for part in slices:
            length = len(part.tokens)
            end = part.start + length
            spans += (len(ids), length, part.start, len(tables))
            ids += part.tokens
            used = -(-end // block_size)
            if used > len(part.blocks):
                raise ValueError(f"a slice up to position {end} names {len(part.blocks)} KV blocks")
            tables += part.blocks[:used]
            last.append(len(ids) - 1)
            furthest = max(furthest, end - 1)
        self._rope.reach(furthest)
        rows = range(len(ids)) if wanted is None else [last[number] for number in wanted]
        self._kept = numbers = array("i", ids)
        offsets = [0]
        for each in (spans, tables, rows):
            offsets.append(numbers.itemsize * len(numbers))
            numbers.extend(each)
        begin, _ = numbers.buffer_info()
        if len(self._logits) < len(rows):
            self._logits = np.empty((len(rows), self._stride), dtype=np.float32)
            self._logits_at = self._logits.ctypes.data
        STEP.pack_into(
            self._record,
            0,
            len(ids),
            len(slices),
            len(rows),
            pool.num_blocks,
            *(begin + offset for offset in offsets),
            *self._rope.addresses,
            self._logits_at,
            self._stride,
            pool.data.ctypes.data,
            pool.block_bytes,
            *_NO_CHOICES,
        )
        return self._step, self._logits[: len(rows)]
