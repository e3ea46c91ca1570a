"""The router service: the oldest live one of a model answers `Place`; the others keep a warm index."""

from __future__ import annotations

import asyncio
import time

from baton.bus.inbox import Delivery, Inbox
from baton.placement.index import PrefixIndex
from baton.placement.placer import Placer
from baton.placement.queue import AdmissionQueue, Waiting
from baton.placement.view import ClusterView
from baton.protocol import subjects
from baton.protocol.base import Message
from baton.protocol.errors import Code, Failure
from baton.protocol.kvevents import KvEvents
from baton.protocol.liveness import Heartbeat, Role, State
from baton.protocol.placing import Place, Placed, Placement, Unreachable
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Drain
from baton.service.base import ServiceHost
from baton.telemetry.metrics import RouterMetrics
from baton_services.router.feed import IndexFeed

ROUND_S = 0.1
FILL_S = 2.0  # at start: how long a worker's snapshot may hold service up
EXPECTED_BACK_S = 30.0  # a worker seen this recently may come back


class RouterService:
    """Holds `Place` in its queue while all workers are full; answers every one in time."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._bus = host.bus
        self._view = ClusterView()
        self._index = PrefixIndex()
        settings = host.settings.router
        self._placer = Placer(self._index, self._view, local_prefill_tokens=settings.local_prefill_tokens)
        self._queue: AdmissionQueue[Delivery] = AdmissionQueue(settings.queue_limit)
        self._metrics = RouterMetrics(host.registry)
        self._last_worker = 0.0  # when one was last alive
        self._started = time.monotonic()
        self._draining = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Fills the index from the live workers, then serves."""
        host = self._host
        self._feed = IndexFeed(self._bus, self._index, group)
        events = await self._bus.inbox(subjects.all_kv_events(host.model), KvEvents)
        inbox = await self._bus.inbox(host.subject, Place, Placed, Unreachable, Drain)
        host.directory.subscribe(self._peer_changed)
        for task in (self._serve_events(events), self._serve(inbox), self._rounds()):
            group.create_task(task)

    async def drain(self, grace_s: float) -> None:
        """Lets what waits be placed; new placements go to the standby."""
        self._draining = True
        until = time.monotonic() + grace_s
        while len(self._queue) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Answers what still waits, so that nobody waits for a router that is gone."""
        _, rest = self._queue.drain(float("inf"), lambda _: None)
        for waiting in rest:
            await self._refuse(waiting.reply, Code.DRAINING, "the router is stopping")

    async def _serve_events(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            self._feed.event(delivery.message)

    async def _serve(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            match delivery.message:
                case Place():
                    await self._place(delivery)
                case Placed(request=request, attempt=attempt):
                    self._queue.remove((request, attempt))
                    self._view.placed((request, attempt))
                    await self._drain_queue()
                case Unreachable(worker=worker, epoch=epoch):
                    self._host.directory.exclude(worker, epoch)
                    self._view.left(worker, epoch)
                case Drain(grace_ms=grace_ms):
                    await delivery.respond(Accepted())
                    self._host.request_drain(grace_ms)

    async def _place(self, delivery: Delivery) -> None:
        place: Place = delivery.message
        now = time.monotonic()
        most = self._placer.too_large(place)
        if most is not None:
            words = f"{place.tokens} tokens do not fit: the KV pool of a worker holds {most}"
            await self._refuse(delivery, Code.CONTEXT_LENGTH, words)
            return
        if not self._queue.put(place, delivery, now):
            await self._refuse(
                delivery, Code.OVERLOADED, "too many requests wait for a worker; try again later"
            )
            return
        await self._drain_queue()

    async def _drain_queue(self) -> None:
        now = time.monotonic()
        placed, expired = self._queue.drain(now, lambda waiting: self._placer.place(waiting.place, now))
        for waiting, placement in placed:
            placement.queued_ms = (now - waiting.since) * 1000
            self._metrics.placements.labels("placed").inc()
            self._metrics.place.observe(now - waiting.since)
            await waiting.reply.respond(placement)
        for waiting in expired:
            await self._refuse(waiting.reply, Code.DEADLINE, "no worker had room before the deadline")
        if len(self._queue) and self._hopeless(now):
            _, rest = self._queue.drain(float("inf"), _never)
            for waiting in rest:
                await self._refuse(waiting.reply, Code.NO_WORKER, "no worker of this model is running")

    def _hopeless(self, now: float) -> bool:
        """No worker lives and none is expected back."""
        if self._view.workers:
            self._last_worker = now
            return False
        return now - max(self._last_worker, self._started) > EXPECTED_BACK_S

    async def _refuse(self, delivery: Delivery, code: Code, words: str) -> None:
        self._metrics.placements.labels(code.value).inc()
        retry = 1_000 if code in (Code.OVERLOADED, Code.NO_WORKER, Code.DRAINING) else None
        answer: Message = Rejected(failure=Failure(code=code, message=words, retry_after_ms=retry))
        await delivery.respond(answer)

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if beat.role not in (Role.PREFILL, Role.DECODE):
            return
        if kind == "left":
            self._view.left(beat.id, beat.epoch)
            self._feed.left((beat.id, beat.epoch))
            return
        self._view.heard(beat)
        if beat.state in (State.READY, State.DRAINING):
            self._feed.heard(beat)

    async def _rounds(self) -> None:
        """Time-outs, what became free by itself, and whether this router can be used."""
        while True:
            now = time.monotonic()
            self._view.expire(now)
            await self._drain_queue()
            self._metrics.waiting.set(len(self._queue))
            self._metrics.indexed_blocks.set(len(self._index))
            await self._report(now)
            await asyncio.sleep(ROUND_S)

    async def _report(self, now: float) -> None:
        beat = self._host.beat
        workers = self._view.ready(Role.DECODE) or self._view.ready(Role.PREFILL)
        serving = self._feed.filled or now - self._started > FILL_S
        state = State.READY if serving else State.STARTING
        if self._draining:
            state = State.DRAINING
        routable = serving and bool(workers) and not self._draining
        if (beat.state, beat.routable) != (state, routable):
            beat.state, beat.routable = state, routable
            await self._host.announce()


def _never(_: Waiting[Delivery]) -> Placement | None:
    return None
