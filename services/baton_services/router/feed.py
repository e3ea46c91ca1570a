"""Keeping the prefix index true: KV events in order, snapshots after a gap."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import msgspec

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.placement.index import PrefixIndex, Worker
from baton.protocol.base import unpack_hashes
from baton.protocol.codec import Codec
from baton.protocol.kvevents import KvEvents, KvSnapshot, KvSnapshotPiece
from baton.protocol.liveness import Heartbeat
from baton.telemetry.logs import get_logger

log = get_logger(__name__)

PIECE_TIMEOUT_S = 2.0
RETRY_S = 0.5
BUFFERED_EVENTS = 4_096  # kept while a snapshot is on its way; with older ones lost, the gap brings another
MOST_BLOCKS = 16_777_216  # of one worker: a pool of 16 Mi blocks

_codec = Codec(KvSnapshotPiece)


class _BadSnapshot(Exception):
    """Pieces that do not belong together: another router's snapshot came in between, or nonsense."""


@dataclass(slots=True)
class _Source:
    """One worker's stream: the number of the last event applied, and what waits for a snapshot."""

    subject: str
    number: int = 0
    claimed: int = 0  # the number that its last heartbeat told
    filled: bool = False
    loading: bool = False
    buffered: deque[KvEvents] = field(default_factory=lambda: deque(maxlen=BUFFERED_EVENTS))


class IndexFeed:
    """Applies each worker's numbered events. A gap, or a heartbeat ahead of us, brings a snapshot."""

    def __init__(self, bus: Bus, index: PrefixIndex, group: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._index = index
        self._group = group
        self._sources: dict[Worker, _Source] = {}

    @property
    def filled(self) -> bool:
        """Whether every known worker's blocks are in the index."""
        return all(source.filled for source in self._sources.values())

    def heard(self, beat: Heartbeat) -> None:
        """A worker's heartbeat: a new one is loaded, and one whose events we missed is loaded again.

        Events that this heartbeat tells of may still wait in our inbox; those of the one before do not.
        """
        key = (beat.id, beat.epoch)
        source = self._sources.setdefault(key, _Source(beat.subject))
        if not source.filled or source.number < source.claimed:
            self._load(key, source)
        source.claimed = beat.load.kv_event if beat.load else 0

    def left(self, worker: Worker) -> None:
        self._sources.pop(worker, None)
        self._index.drop(worker)

    def event(self, event: KvEvents) -> None:
        """Applies an event, in order; duplicates and events of unknown workers are ignored."""
        key = (event.worker, event.epoch)
        source = self._sources.get(key)
        if source is None or (source.filled and event.number <= source.number):
            return
        if source.loading or not source.filled or event.number != source.number + 1:
            source.buffered.append(event)
            self._load(key, source)
            return
        self._apply(key, source, event)

    def _apply(self, key: Worker, source: _Source, event: KvEvents) -> None:
        try:
            removed, stored = unpack_hashes(event.removed), unpack_hashes(event.stored)
        except msgspec.ValidationError as error:
            log.warning("KV event %d of %s: %s", event.number, key[0], error)
            self._load(key, source)
            return
        self._index.remove(key, removed.tolist())
        self._index.store(key, stored.tolist())
        source.number = event.number

    def _load(self, key: Worker, source: _Source) -> None:
        if not source.loading:
            source.loading = True
            self._group.create_task(self._snapshot(key, source))

    async def _snapshot(self, key: Worker, source: _Source) -> None:
        """Loads all hashes of a worker, then applies what came meanwhile."""
        while self._sources.get(key) is source:
            try:
                number, pieces = await self._pieces(key, source.subject)
            except (BusDown, CallTimeout, CallRejected, NoResponder, _BadSnapshot) as error:
                log.debug("snapshot of %s: %r", key[0], error)
                await asyncio.sleep(RETRY_S)
                continue
            if self._sources.get(key) is not source:
                return
            self._index.drop(key)
            for hashes in pieces:
                self._index.store(key, hashes)
                await asyncio.sleep(0)
                if self._sources.get(key) is not source:
                    self._index.drop(key)
                    return
            source.number, source.filled, source.loading = number, True, False
            waiting = list(source.buffered)
            source.buffered.clear()
            for event in waiting:
                self.event(event)
            return

    async def _pieces(self, key: Worker, subject: str) -> tuple[int, list[list[int]]]:
        pieces: list[list[int]] = []
        number = cursor = total = 0
        while True:
            piece: KvSnapshotPiece = await self._bus.call(
                subject, KvSnapshot(cursor=cursor), _codec, timeout_s=PIECE_TIMEOUT_S
            )
            if piece.epoch != key[1] or (pieces and piece.number != number):
                raise _BadSnapshot(f"a piece of event {piece.number} of epoch {piece.epoch}")
            try:
                hashes = unpack_hashes(piece.hashes).tolist()
            except msgspec.ValidationError as error:
                raise _BadSnapshot(str(error)) from error
            number, total = piece.number, total + len(hashes)
            pieces.append(hashes)
            if not piece.cursor:
                return number, pieces
            if piece.cursor <= cursor or total > MOST_BLOCKS:
                raise _BadSnapshot(f"cursor {piece.cursor} after {cursor}, {total} blocks")
            cursor = piece.cursor
