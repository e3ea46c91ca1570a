"""The KV pool's twin in device memory: steps work on it, peers see the pool, blocks are copied when needed.

A record of each slot says whose content the device has: the slot's generation and how many of its tokens.
What a step needs and the device lacks was written to the pool by a pull or a store: it goes up before the
step. What a step wrote goes down when somebody asks the pool for the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.plan import Slice
from baton.kvcache.pool import KvPool
from baton_kernels.gpu.kv_move import scatter_blocks
from baton_kernels.gpu.pages import Pages, PageShape

STAGED = 64  # blocks that go up at once

Slots = npt.NDArray[np.int64]


class DeviceMirror:
    """`pages` on the device, in step with a pool in host memory."""

    def __init__(self, pool: KvPool, shape: PageShape, device: torch.device) -> None:
        raw = torch.zeros(pool.num_blocks, shape.block_bytes, dtype=torch.uint8, device=device)
        self.pages = Pages(raw, shape)
        self._pool = pool
        self._size = shape.block_size
        self._generations = np.zeros(pool.num_blocks, dtype=np.uint64)
        self._tokens = np.zeros(pool.num_blocks, dtype=np.int32)  # on the device
        self._ahead = np.zeros(pool.num_blocks, dtype=np.bool_)  # the device has more than the pool
        self._lock = Lock()
        on_gpu = device.type == "cuda"
        # KV moves have a stream of their own: a peer that asks for a block does not wait for the whole step.
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._written = torch.cuda.Event() if on_gpu else None  # the last step's K and V
        staged = min(STAGED, pool.num_blocks)
        self._host = torch.empty(staged, shape.block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._staging = torch.empty(staged, shape.block_bytes, dtype=torch.uint8, device=device)
        pool.before_read = self.bring_down

    def bring_up(self, slices: Sequence[Slice]) -> None:
        """Before a step: copies to the device what its sequences know and the device lacks."""
        lacking = [self._lacking(part) for part in slices]
        slots = np.unique(np.concatenate(lacking)) if lacking else np.zeros(0, dtype=np.int64)
        with self._lock:
            for begin in range(0, len(slots), len(self._host)):
                self._up(slots[begin : begin + len(self._host)])

    def wrote(self, slices: Sequence[Slice]) -> None:
        """After a step: its tokens' K and V are on the device only."""
        with self._lock:
            if self._written is not None:
                self._written.record()
            for part in slices:
                end = part.start + len(part.tokens)
                for number in range(part.start // self._size, -(-end // self._size)):
                    slot = part.blocks[number]
                    self._generations[slot] = self._pool.generations[slot]
                    self._tokens[slot] = min(end - number * self._size, self._size)
                    self._ahead[slot] = True

    def bring_down(self, slot: int) -> None:
        """Copies a slot to the pool if the device has more of it: when the pool is read, in any thread."""
        with self._lock:
            if not self._ahead[slot] or self._generations[slot] != self._pool.generations[slot]:
                return
            self._down(slot)
            self._ahead[slot] = False

    def close(self) -> None:
        """The pool stands alone from here on."""
        self._pool.before_read = None

    def _lacking(self, part: Slice) -> Slots:
        """The slots of a slice whose content before `start` the device does not have."""
        count = -(-part.start // self._size)
        slots = np.asarray(part.blocks[:count], dtype=np.int64)
        needed = np.minimum(part.start - np.arange(count) * self._size, self._size)
        stale = (self._generations[slots] != self._pool.generations[slots]) | (self._tokens[slots] < needed)
        self._tokens[slots[stale]] = needed[stale]
        return slots[stale]

    def _up(self, slots: Slots) -> None:
        count = len(slots)
        self._host[:count].numpy()[:] = self._pool.data[slots]
        self._staging[:count].copy_(self._host[:count], non_blocking=True)
        on_device = torch.from_numpy(slots.astype(np.int32)).to(self._staging.device)
        scatter_blocks(self.pages, on_device, self._staging)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()  # the staging buffers are used again
        self._generations[slots] = self._pool.generations[slots]
        self._ahead[slots] = False

    def _down(self, slot: int) -> None:
        target = torch.from_numpy(self._pool.data[slot])
        if self._stream is None or self._written is None:
            target.copy_(self.pages.raw[slot])
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written)  # a step that samples nothing is not waited for otherwise
            self._host[0].copy_(self.pages.raw[slot], non_blocking=True)
            self._stream.synchronize()
        target.copy_(self._host[0])
