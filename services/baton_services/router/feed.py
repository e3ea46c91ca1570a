"""Keeping the prefix index true: KV events in order, snapshots after a gap."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

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
BUFFERED_EVENTS = 4_096

_codec = Codec(KvSnapshotPiece)


@dataclass(slots=True)
class _Source:
    """One worker's stream: the number of the last event applied, and what waits for a snapshot."""

    subject: str
    number: int = 0
    filled: bool = False
    loading: bool = False
    buffered: list[KvEvents] = field(default_factory=list)


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
        """A worker's heartbeat: a new one is loaded, and one whose events we missed is loaded again."""
        key = (beat.id, beat.epoch)
        source = self._sources.setdefault(key, _Source(beat.subject))
        sent = beat.load.kv_event if beat.load else 0
        if not source.filled or sent > source.number:
            self._load(key, source)

    def left(self, worker: Worker) -> None:
        self._sources.pop(worker, None)
        self._index.drop(worker)

    def event(self, event: KvEvents) -> None:
        """Applies an event, in order; duplicates and events of unknown workers are ignored."""
        key = (event.worker, event.epoch)
        source = self._sources.get(key)
        if source is None or (source.filled and event.number <= source.number):
            return
        if source.loading or event.number != source.number + 1:
            source.buffered = [*source.buffered[-BUFFERED_EVENTS:], event]
            self._load(key, source)
            return
        self._apply(key, source, event)

    def _apply(self, key: Worker, source: _Source, event: KvEvents) -> None:
        self._index.remove(key, unpack_hashes(event.removed).tolist())
        self._index.store(key, unpack_hashes(event.stored).tolist())
        source.number = event.number

    def _load(self, key: Worker, source: _Source) -> None:
        if not source.loading:
            source.loading = True
            self._group.create_task(self._snapshot(key, source))

    async def _snapshot(self, key: Worker, source: _Source) -> None:
        """Loads all hashes of a worker, then applies what came meanwhile."""
        while self._sources.get(key) is source:
            try:
                number, hashes = await self._pieces(source.subject)
            except (BusDown, CallTimeout, CallRejected, NoResponder) as error:
                log.debug("snapshot of %s: %r", key[0], error)
                await asyncio.sleep(RETRY_S)
                continue
            if self._sources.get(key) is not source:
                return
            self._index.drop(key)
            self._index.store(key, hashes)
            source.number, source.filled, source.loading = number, True, False
            waiting, source.buffered = source.buffered, []
            for event in waiting:
                self.event(event)
            return

    async def _pieces(self, subject: str) -> tuple[int, list[int]]:
        hashes: list[int] = []
        cursor = 0
        while True:
            piece = await self._bus.call(
                subject, KvSnapshot(cursor=cursor), _codec, timeout_s=PIECE_TIMEOUT_S
            )
            hashes += unpack_hashes(piece.hashes).tolist()
            if not piece.cursor:
                return piece.number, hashes
            cursor = piece.cursor
