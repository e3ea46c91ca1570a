"""A router in this process, and workers that only say what the test tells them to, on a real bus."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from baton.bus.connection import Bus, CallRejected
from baton.config.settings import Settings
from baton.protocol import subjects
from baton.protocol.base import pack_hashes
from baton.protocol.codec import Codec
from baton.protocol.errors import Failure
from baton.protocol.handoff import Address
from baton.protocol.kvevents import KvEvents, KvSnapshot, KvSnapshotPiece
from baton.protocol.liveness import Ask, Geometry, Heartbeat, Load, Role, State, WorkerInfo
from baton.protocol.placing import Place, Placed, Placement
from baton.service import heart
from baton.service.base import ServiceHost
from baton_services.router.service import RouterService

BLOCK = 16
_codec = Codec(Placement)


class FakeWorker:
    """Heartbeats, KV events and snapshots by hand. `held` is what a snapshot gives, in pieces of `piece`."""

    def __init__(self, bus: Bus, model: str, id: str, role: Role = Role.DECODE, *, epoch: int = 1) -> None:
        self.bus = bus
        self.model = model
        self.held: list[int] = []
        self.number = 0  # of the last KV event
        self.piece = 1_000
        self.snapshots = 0  # begun
        self.silent = False  # its pieces are of another epoch: no use to anybody
        self.after_piece: Callable[[], None] = lambda: None
        self.beat = Heartbeat(
            role=role,
            id=id,
            epoch=epoch,
            model=model,
            state=State.READY,
            subject=subjects.control(model, role, id, epoch),
            interval_ms=60_000,
            load=Load(),
            worker=WorkerInfo(
                fingerprint="f",
                geometry=Geometry(block_size=BLOCK, block_bytes=1),
                num_blocks=1_000,
                address=Address(host="h"),
                max_batch_tokens=256,
                max_sequences=8,
            ),
        )

    async def announce(self, *, load: Load | None = None, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self.beat, name, value)
        self.beat.load = load or Load()
        self.beat.load.kv_event = self.number
        self.beat.seq += 1
        await self.bus.publish(subjects.heartbeat(self.model, self.beat.role, self.beat.id), self.beat)

    async def stores(self, *hashes: int, removed: tuple[int, ...] = (), lost: bool = False) -> None:
        """Its cache changes; `lost`: the event that tells of it never arrives."""
        self.held = [value for value in self.held if value not in removed] + list(hashes)
        self.number += 1
        if not lost:
            await self.event(self.number, hashes, removed)

    async def event(self, number: int, stored: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> None:
        event = KvEvents(
            worker=self.beat.id,
            epoch=self.beat.epoch,
            number=number,
            stored=pack_hashes(np.asarray(stored, np.uint64)),
            removed=pack_hashes(np.asarray(removed, np.uint64)),
        )
        await self.bus.publish(subjects.kv_events(self.model, self.beat.id, self.beat.epoch), event)

    async def serve(self) -> None:
        """Answers `Ask` and `KvSnapshot`."""
        asks = await self.bus.inbox(subjects.ask(), Ask)
        control = await self.bus.inbox(self.beat.subject, KvSnapshot)
        await self.announce()

        async def answer_asks() -> None:
            async for _ in asks:
                await self.announce(load=self.beat.load)

        async with asyncio.TaskGroup() as group:
            group.create_task(answer_asks())
            async for delivery in control:
                await delivery.respond(self.answer(delivery.message.cursor))

    def answer(self, cursor: int) -> KvSnapshotPiece:
        self.snapshots += cursor == 0
        following = cursor + self.piece
        piece = KvSnapshotPiece(
            epoch=0 if self.silent else self.beat.epoch,
            number=self.number,
            hashes=pack_hashes(np.asarray(self.held[cursor:following], np.uint64)),
            cursor=following if following < len(self.held) else 0,
        )
        self.after_piece()
        return piece


class Cluster:
    """One model's router(s) and workers. Its own connection plays the tokenizer."""

    def __init__(self, connect: Callable[[str], Any], bus: Bus) -> None:
        self._connect = connect
        self.bus = bus
        self.model = f"m-{uuid.uuid4().hex}"
        self._tasks: list[asyncio.Task[None]] = []

    async def worker(self, id: str, role: Role = Role.DECODE, *, epoch: int = 1, **fields: Any) -> FakeWorker:
        """A live worker, which has said so."""
        worker = FakeWorker(await self._connect(id), self.model, id, role, epoch=epoch)
        for name, value in fields.items():
            setattr(worker, name, value)
        self._tasks.append(asyncio.create_task(worker.serve()))
        async with asyncio.timeout(10):
            while not worker.beat.seq:
                await asyncio.sleep(0.005)
        return worker

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    @asynccontextmanager
    async def router(
        self, id: str = "router-0", *, clock: Callable[[], float] | None = None, **settings: int
    ) -> AsyncIterator[Router]:
        options = Settings()
        for name, value in settings.items():
            setattr(options.router, name, value)
        host = ServiceHost(Role.ROUTER, options, await self._connect(id), id=id, model=self.model)
        service = RouterService(host, clock=clock) if clock else RouterService(host)
        router = Router(host, service, self.bus)
        router.task = asyncio.create_task(router.live())
        try:
            await router.until(lambda: host.beat.state is State.READY)
            yield router
        finally:
            await router.kill()


class Router:
    """A running router and how to ask it."""

    def __init__(self, host: ServiceHost, service: RouterService, bus: Bus) -> None:
        self.host = host
        self.service = service
        self._bus = bus
        self._asked = 0
        self.task: asyncio.Task[None]

    async def kill(self) -> None:
        """Ends it without a word. Raises what had ended it before."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.host.bus.close()

    async def live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(heart.beat(self.host, lambda: None))
            group.create_task(heart.answer_asks(self.host))
            group.create_task(self.host.directory.run())
            await self.service.start(group)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)

    async def place(self, tokens: int = 100, *, timeout_s: float = 5.0, **fields: Any) -> Placement:
        self._asked += 1
        hashes = fields.pop("hashes", b"")
        packed = hashes if isinstance(hashes, bytes) else pack_hashes(np.asarray(hashes, np.uint64))
        given = {
            "attempt": 0,
            "fingerprint": "f",
            "max_new_tokens": 16,
            "request": f"r{self._asked}",
            **fields,
        }
        query = Place(tokens=tokens, hashes=packed, **given)
        answer = await self._bus.call(self.host.subject, query, _codec, timeout_s=timeout_s)
        assert isinstance(answer, Placement)
        return answer

    async def refused(self, tokens: int = 100, **fields: Any) -> Failure:
        try:
            placement = await self.place(tokens, **fields)
        except CallRejected as refusal:
            return refusal.failure
        raise AssertionError(f"placed: {placement}")

    async def hits(self, chain: list[int]) -> int:
        """Tokens of `chain` found in the cache of the worker it would be given. Leaves no trace."""
        placement = await self.place(len(chain) * BLOCK + 1, hashes=chain, request="probe")
        await self._bus.publish(self.host.subject, Placed(request="probe", attempt=0))
        return placement.prefill_hit_tokens if placement.prefill else placement.decode_hit_tokens
