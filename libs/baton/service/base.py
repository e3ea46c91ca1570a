"""What a service is, and what its host gives it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton import __version__
from baton.bus.connection import Bus, BusDown
from baton.bus.directory import Directory
from baton.config.settings import Settings
from baton.protocol import subjects
from baton.protocol.liveness import Heartbeat, Role, State
from baton.protocol.stats import Snapshot
from baton.telemetry.exposition import snapshot

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class StartupError(Exception):
    """A service cannot start, for a reason its user can mend. The message is one line that names the fix."""


class Service(Protocol):
    """One kind of process. Made by a factory that gets the host; the bus is up by then."""

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Begins to serve: opens inboxes, puts its tasks in `group` (the host ends them), says `READY`.

        Raises:
            StartupError: it cannot, and how to mend it.
        """

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, and returns once what runs has ended, after `grace_s` at the latest."""

    async def stop(self) -> None:
        """Lets go of everything it holds outside this process. Also called after a failure, half started."""


class ServiceHost:
    """One process on the bus: who it is, how it says so, and what it shares with its service.

    `beat` is sent as it stands each second. The service sets `state`, `load`, `worker`, `routable`, `url`,
    `note` and `model_info` in it, and calls `announce` (or, outside a coroutine, `touch`) when peers should
    know at once. `epoch` tells this process from one of the same id before or after it.
    """

    def __init__(self, role: Role, settings: Settings, bus: Bus, *, id: str, model: str) -> None:
        self.role = role
        self.settings = settings
        self.bus = bus
        self.id = id
        self.model = model
        self.epoch = time.time_ns()
        self.subject = subjects.control(model, role, id, self.epoch)
        self.directory = Directory(bus, model=model or None)
        self.registry = CollectorRegistry()
        self.stopping = asyncio.Event()
        self.grace_s = settings.worker.grace_ms / 1000
        self.beat = Heartbeat(
            role=role,
            id=id,
            epoch=self.epoch,
            model=model,
            subject=self.subject,
            interval_ms=int(HEARTBEAT_S * 1000),
            started_ms=self.epoch // 1_000_000,
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
        )
        self.touched = asyncio.Event()
        self._ending: State | None = None
        self._before_beat: list[Callable[[], None]] = []
        self._heartbeat_subject = subjects.heartbeat(model, role, id)
        self._stats_subject = subjects.stats(id)
        bus.on_change(self._bus_changed)

    def on_beat(self, callback: Callable[[], None]) -> None:
        """Calls `callback` just before each heartbeat is sent, to bring `beat.load` up to date.

        Not while the bus is away, so what a heartbeat reports once (`Load.placements`) is not lost then.
        """
        self._before_beat.append(callback)

    async def announce(self) -> None:
        """Sends a heartbeat now; nothing while the bus is away (it is sent when the bus is back)."""
        if not self.bus.up.is_set():
            return
        for callback in self._before_beat:
            callback()
        if self._ending is not None:
            self.beat.state, self.beat.routable = self._ending, False
        self.beat.seq += 1
        try:
            await self.bus.publish(self._heartbeat_subject, self.beat)
        except BusDown:
            _log.debug("heartbeat %d not sent: the bus is away", self.beat.seq)

    def enter(self, ending: State) -> None:
        """From now on heartbeats say `ending` (`DRAINING`, `STOPPED`), whatever the service sets."""
        self._ending = self.beat.state = ending
        self.beat.routable = False

    def touch(self) -> None:
        """Has a heartbeat sent soon; several calls make one."""
        self.touched.set()

    async def publish_snapshot(self) -> None:
        """Sends the registry to the metrics service; nothing while the bus is away."""
        if not self.bus.up.is_set():
            return
        families = snapshot(self.registry)
        message = Snapshot(role=self.role, id=self.id, epoch=self.epoch, model=self.model, families=families)
        try:
            await self.bus.publish(self._stats_subject, message)
        except BusDown:
            _log.debug("metrics not sent: the bus is away")

    def request_drain(self, grace_ms: int) -> None:
        """Begins the end of this process: it drains for at most `grace_ms`, then exits.

        `worker.grace_ms` caps it. Only the first call counts.
        """
        if not self.stopping.is_set():
            self.grace_s = min(self.grace_s, max(0, grace_ms) / 1000)
            self.stopping.set()

    def _bus_changed(self, up: bool) -> None:
        if up:
            self.touch()


def default_instance(role: Role) -> str:
    """An id for a process that was given none: unique on its host, stable in a container."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:40]
    return f"{role}-{host or 'host'}-{os.getpid()}"
