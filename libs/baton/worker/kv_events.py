"""Telling routers which blocks this worker holds: numbered events, and snapshots in pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from baton.bus.connection import Bus, BusDown
from baton.engine.block_pool import BlockPool
from baton.protocol import subjects
from baton.protocol.base import pack_hashes
from baton.protocol.kvevents import KvEvents, KvSnapshotPiece

PIECE_HASHES = 32_768  # 256 KB
# Several steps' news make one event: a prefix that a router hears of this much later is as good a hint.
EVENT_S = 0.05


class KvEventStream:
    """Publishes what the block pool's prefix index gained and lost since the last event.

    Events are numbered without a gap, also over the ones a bus that is away never carried: whoever misses
    one asks for a snapshot.
    """

    def __init__(
        self,
        bus: Bus,
        pool: BlockPool,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        model: str,
        worker: str,
        epoch: int,
    ) -> None:
        """Args: spawn: runs a coroutine in a task that is owned."""
        self._bus = bus
        self._spawn = spawn
        self._told = 0.0  # when
        self._later = False
        self._pool = pool
        self._worker = worker
        self._epoch = epoch
        self._subject = subjects.kv_events(model, worker, epoch)
        self._piece: tuple[int, np.ndarray] = (0, np.empty(0, dtype=np.uint64))
        self.number = 0  # of the last event

    async def flush(self) -> None:
        """Tells what is new, at once or together with what the next steps bring."""
        wait = self._told + EVENT_S - time.monotonic()
        if wait <= 0:
            await self._tell()
        elif not self._later:
            self._later = True
            self._spawn(self._tell_later(wait))

    async def _tell_later(self, wait: float) -> None:
        await asyncio.sleep(wait)
        self._later = False
        await self._tell()

    async def _tell(self) -> None:
        stored, removed = self._pool.drain_events()
        if not (len(stored) or len(removed)):
            return
        self._told = time.monotonic()
        self.number += 1
        event = KvEvents(
            worker=self._worker,
            epoch=self._epoch,
            number=self.number,
            stored=pack_hashes(stored),
            removed=pack_hashes(removed),
        )
        try:
            await self._bus.publish(self._subject, event)
        except BusDown:
            return  # a router sees the gap and asks for a snapshot

    async def snapshot(self, cursor: int) -> KvSnapshotPiece:
        """The piece at `cursor`, an offset in hashes; 0 begins a new snapshot, true as of its number."""
        if cursor == 0:
            await self._tell()  # what comes and goes between two events is in none
            self._piece = (self.number, np.fromiter(self._pool.indexed(), dtype=np.uint64))
        number, hashes = self._piece
        piece = hashes[cursor : cursor + PIECE_HASHES]
        following = cursor + PIECE_HASHES
        return KvSnapshotPiece(
            epoch=self._epoch,
            number=number,
            hashes=pack_hashes(piece),
            cursor=following if following < len(hashes) else 0,
        )
