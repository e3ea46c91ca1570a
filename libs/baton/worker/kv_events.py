"""Telling routers which blocks this worker holds: numbered events, and snapshots in pieces."""

from __future__ import annotations

import numpy as np

from baton.bus.connection import Bus, BusDown
from baton.engine.block_pool import BlockPool
from baton.protocol import subjects
from baton.protocol.base import pack_hashes
from baton.protocol.kvevents import KvEvents, KvSnapshotPiece

PIECE_HASHES = 32_768  # 256 KB


class KvEventStream:
    """Publishes what the block pool's prefix index gained and lost since the last flush.

    Events are numbered without a gap, also over the ones a bus that is away never carried: whoever misses
    one asks for a snapshot.
    """

    def __init__(self, bus: Bus, pool: BlockPool, model: str, worker: str, epoch: int) -> None:
        self._bus = bus
        self._pool = pool
        self._worker = worker
        self._epoch = epoch
        self._subject = subjects.kv_events(model, worker, epoch)
        self._piece: tuple[int, np.ndarray] = (0, np.empty(0, dtype=np.uint64))
        self.number = 0  # of the last event

    async def flush(self) -> None:
        stored, removed = self._pool.drain_events()
        if not (len(stored) or len(removed)):
            return
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

    def snapshot(self, cursor: int) -> KvSnapshotPiece:
        """The piece at `cursor`, an offset in hashes; 0 begins a new snapshot, true as of its number."""
        if cursor == 0:
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
