"""Follows the heartbeats of the cluster: the asynchronous side of `Roster`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton.bus.connection import Bus, BusDown
from baton.bus.inbox import Inbox
from baton.bus.roster import Change, Roster
from baton.protocol import subjects
from baton.protocol.liveness import Ask, Heartbeat, Role

_log = logging.getLogger(__name__)

LONGEST_SWEEP_S = 60.0
SHORTEST_SWEEP_S = 0.02


class Directory:
    """Who is alive. With `model`: the services of that model and those of every model; else all.

    While the bus is down nobody expires: on its return everybody has their full time again, and is asked.
    """

    def __init__(self, bus: Bus, *, model: str | None) -> None:
        self._bus = bus
        self._models = None if model is None else {model, ""}
        self._roster = Roster()
        self._callbacks: list[Callable[[Heartbeat, str], None]] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self._asking = False
        self._joined = asyncio.Event()  # an expiry may be earlier than the sweep had thought
        self._loop = asyncio.get_running_loop()
        self.ignored = 0  # heartbeats on a subject that is not their sender's

    async def run(self) -> None:
        """Follows heartbeats until cancelled."""
        # All models on one subscription: a heartbeat a second and process is little, and `_` has to be heard.
        inbox = await self._bus.inbox(subjects.all_heartbeats(), Heartbeat)
        self._bus.on_change(self._bus_changed)
        self._asking = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(inbox))
                group.create_task(self._sweep())
        finally:
            inbox.close()

    def live(self, role: Role, *, ready: bool = True) -> list[Heartbeat]:
        """Those of a role that are neither silent nor excluded, the one that started first first.

        `ready`: only those that take work, else in any state.
        """
        return self._roster.live(role, self._now(), ready=ready)

    def get(self, instance: str) -> Heartbeat | None:
        """The newest heartbeat of a process, excluded or not; None when it is silent or unknown."""
        return self._roster.get(instance, self._now())

    def exclude(self, instance: str, epoch: int) -> None:
        """A call to this process failed: leaves it out of `live` until it sends a heartbeat after now."""
        self._roster.exclude(instance, epoch)

    def subscribe(self, callback: Callable[[Heartbeat, str], None]) -> None:
        """`callback(beat, kind)` from now on; kind: joined, updated, left (silent, stopped, or replaced)."""
        self._callbacks.append(callback)

    async def wait_for(self, predicate: Callable[[Directory], bool], timeout_s: float) -> bool:
        """Waits until `predicate(self)` holds, looking after every change. False: it did not in time."""
        deadline = self._loop.time() + timeout_s
        while not predicate(self):
            waiter = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                return predicate(self)
            finally:
                self._waiters.discard(waiter)
        return True

    def _now(self) -> float:
        """The clock of expiry: it stands still while the bus is down."""
        down_since = self._bus.down_since
        return time.monotonic() if down_since is None else down_since

    async def _listen(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            beat: Heartbeat = delivery.message
            if not delivery.subject.endswith(f".{beat.role}.{beat.id}"):
                self.ignored += 1
                _log.debug("heartbeat of %s %s on %s", beat.role, beat.id, delivery.subject)
            elif self._models is None or beat.model in self._models:
                self._tell(self._roster.heard(beat, self._now()))

    async def _sweep(self) -> None:
        while True:
            self._joined.clear()
            if self._asking:
                self._asking = False
                await self._ask()
            self._tell(self._roster.expire(self._now()))
            expiry = self._roster.next_expiry()
            pause = LONGEST_SWEEP_S if expiry is None else expiry - self._now()
            try:
                async with asyncio.timeout(min(LONGEST_SWEEP_S, max(SHORTEST_SWEEP_S, pause))):
                    await self._joined.wait()
            except TimeoutError:
                continue

    async def _ask(self) -> None:
        try:
            await self._bus.publish(subjects.ask(), Ask())
        except BusDown:
            _log.debug("the bus is down: heartbeats are asked for on its return")

    def _bus_changed(self, up: bool) -> None:
        if up:
            self._roster.forgive(time.monotonic())
            self._asking = True
            self._joined.set()

    def _tell(self, changes: list[Change]) -> None:
        for beat, kind in changes:
            if kind == "joined":
                self._joined.set()
            for callback in self._callbacks:
                callback(beat, kind)
        if changes:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
