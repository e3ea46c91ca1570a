"""The router service: the oldest live one of a model answers `Place`; the others keep a warm index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.bus.inbox import Delivery, Inbox
from baton.placement.backlog import Backlog
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

ROUND_S = 0.1  # while something waits
SLOW_ROUND_S = 1.0  # while assignments may expire
FILL_S = 2.0  # at start: how long a worker's snapshot may hold service up
EXPECTED_BACK_S = 30.0  # a worker seen this recently may come back
OVERDUE_ROUND_S = 0.25
BURST = 64  # messages taken before the queue is looked at


class RouterService:
    """Holds `Place` in its queue while all workers are full; answers every one in time."""

    def __init__(self, host: ServiceHost, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._bus = host.bus
        self._clock = clock
        self._view = ClusterView()
        self._index = PrefixIndex()
        settings = host.settings.router
        self._placer = Placer(self._index, self._view, local_prefill_tokens=settings.local_prefill_tokens)
        self._queue: AdmissionQueue[Delivery] = AdmissionQueue(settings.queue_limit)
        self._backlog = Backlog()
        self._look_at = 0.0  # when overdue ones are looked for again
        self._max_wait_s = settings.max_wait_ms / 1000
        self._metrics = RouterMetrics(host.registry)
        self._metrics.waiting.set_function(lambda: len(self._queue))
        self._metrics.indexed_blocks.set_function(lambda: len(self._index))
        self._placed = self._metrics.placements.labels("placed")
        self._hope = clock()  # when a worker was last there, or this router began
        self._started = clock()
        self._changed = asyncio.Event()
        self._warm = False
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
        self._changed.set()
        until = self._clock() + grace_s
        while len(self._queue) and self._clock() < until:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Answers what still waits, so that nobody waits for a router that is gone."""
        for waiting in self._queue.clear():
            await self._refuse(waiting.reply, Code.DRAINING, "the router is stopping")

    async def _serve_events(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            self._feed.event(delivery.message)

    async def _serve(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            await self._take(delivery)
            for _ in range(BURST):  # all that is here first: the queue is tried once for them together
                more = inbox.get_nowait()
                if more is None:
                    break
                await self._take(more)
            await self._drain_queue()

    async def _take(self, delivery: Delivery) -> None:
        match delivery.message:
            case Place() as place:
                await self._place(place, delivery)
            case Placed(request=request, attempt=attempt):
                self._queue.remove((request, attempt))
                self._view.placed((request, attempt))
            case Unreachable(worker=worker, epoch=epoch):
                self._host.directory.exclude(worker, epoch)
                self._view.exclude(worker, epoch)
            case Drain(grace_ms=grace_ms):
                await delivery.respond(Accepted())
                self._host.request_drain(grace_ms)

    async def _place(self, place: Place, delivery: Delivery) -> None:
        most = self._placer.too_large(place)
        if len(place.hashes) % 8:
            await self._refuse(delivery, Code.MALFORMED, "block hashes take 8 bytes each")
        elif most is not None:
            words = f"{place.tokens} tokens do not fit: the KV pool of a worker holds {most}"
            await self._refuse(delivery, Code.CONTEXT_LENGTH, words)
        elif not place.attempt and (wait_s := self._expected_wait_s()) > self._max_wait_s:
            # Replays and moves are of requests that were admitted: those go on.
            words = f"a worker would be free in about {wait_s:.0f} s; try again later"
            await self._refuse(delivery, Code.OVERLOADED, words, retry_ms=int(wait_s * 1000))
        elif not self._queue.put(place, delivery, self._clock()):
            words = "too many requests wait for a worker; try again later"
            await self._refuse(delivery, Code.OVERLOADED, words)

    def _expected_wait_s(self) -> float:
        return self._backlog.wait_s(len(self._queue), self._clock())

    async def _refuse_overdue(self, now: float) -> None:
        """Keeps the wait of those behind within bounds. While no worker is there, all wait for one."""
        if now < self._look_at or not self._routable():
            return
        self._look_at = now + OVERDUE_ROUND_S
        for waiting in self._queue.overdue(now - self._max_wait_s):
            words = f"no worker was free for {self._max_wait_s:g} s; try again later"
            await self._refuse(waiting.reply, Code.OVERLOADED, words)

    async def _drain_queue(self) -> None:
        if not len(self._queue):
            self._backlog.empty()
            return
        now = self._clock()
        for waiting in self._queue.expired(now):
            words = "no worker had room before the deadline"
            await self._refuse(waiting.reply, Code.DEADLINE, words)
        await self._refuse_overdue(now)
        attempt = self._placer.round(now)
        for waiting, placement in self._queue.drain(lambda entry: attempt(entry.place, entry.since)):
            await self._answer(waiting, placement, now)
        if not len(self._queue):
            return
        self._changed.set()  # rounds go on while something waits
        if self._hopeless(now):
            for waiting in self._queue.clear():
                await self._refuse(waiting.reply, Code.NO_WORKER, "no worker of this model is running")

    async def _answer(self, waiting: Waiting[Delivery], placement: Placement, now: float) -> None:
        placement.queued_ms = (now - waiting.since) * 1000
        self._placed.inc()
        self._backlog.placed(now)
        self._metrics.place.observe(now - waiting.since)
        await waiting.reply.respond(placement)

    def _hopeless(self, now: float) -> bool:
        """No worker lives and none is expected back."""
        if self._view.expected:
            self._hope = now
        return now - self._hope > EXPECTED_BACK_S

    async def _refuse(self, delivery: Delivery, code: Code, words: str, *, retry_ms: int = 1_000) -> None:
        self._metrics.placements.labels(code.value).inc()
        retry = retry_ms if code in (Code.OVERLOADED, Code.NO_WORKER, Code.DRAINING) else None
        answer: Message = Rejected(failure=Failure(code=code, message=words, retry_after_ms=retry))
        await delivery.respond(answer)

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if beat.role not in (Role.PREFILL, Role.DECODE):
            return
        if kind == "left":
            self._hope = self._clock()
            self._view.left(beat.id, beat.epoch)
            self._feed.left((beat.id, beat.epoch))
        else:
            self._view.heard(beat)
            if beat.state in (State.READY, State.DRAINING):
                self._feed.heard(beat)
        if not self._warm or len(self._queue) or self._host.beat.routable != self._routable():
            self._changed.set()

    async def _rounds(self) -> None:
        """Time-outs, what became free by itself, and whether this router can be used. Rests when idle."""
        while True:
            self._changed.clear()
            self._view.expire(self._clock())
            await self._drain_queue()
            await self._report()
            if len(self._queue) or (self._view.workers and not self._warm):
                await asyncio.sleep(ROUND_S)
                continue
            try:
                async with asyncio.timeout(SLOW_ROUND_S if self._view.outstanding else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _routable(self) -> bool:
        """Whether a `Place` sent now is answered well: from a filled index, unless that takes too long."""
        if self._draining or not (self._view.ready(Role.DECODE) or self._view.ready(Role.PREFILL)):
            return False
        self._warm = self._warm or self._feed.filled or self._clock() - self._started > FILL_S
        return self._warm

    async def _report(self) -> None:
        beat, routable = self._host.beat, self._routable()
        ready = self._feed.filled or self._warm or beat.state is State.READY
        state = State.READY if ready else State.STARTING
        if self._draining:
            state = State.DRAINING
        if (beat.state, beat.routable) != (state, routable):
            beat.state, beat.routable = state, routable
            await self._host.announce()
