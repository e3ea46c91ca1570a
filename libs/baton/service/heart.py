"""What the host does all the time: heartbeats, answers to `Ask`, metric snapshots."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from baton.bus.pace import to_next
from baton.protocol import subjects
from baton.protocol.liveness import Ask
from baton.service.base import HEARTBEAT_S, ServiceHost
from baton.telemetry.state_file import write_state

_log = logging.getLogger(__name__)

COALESCE_S = 0.02  # touches this close together make one heartbeat
ASK_JITTER_S = 0.05  # so that a whole cluster does not answer one `Ask` in the same instant

ASKS_LIMIT = 64  # more asks at once than that are answered by the same few heartbeats


async def beat(host: ServiceHost, check: Callable[[], None]) -> None:
    """Sends heartbeats for ever; calls `check` each second, which raises to end the process."""
    while True:
        host.touched.clear()
        await host.announce()
        check()
        await _tell_probes(host)
        try:
            async with asyncio.timeout(to_next(HEARTBEAT_S)):
                await host.touched.wait()
        except TimeoutError:
            continue
        await asyncio.sleep(COALESCE_S)


async def _tell_probes(host: ServiceHost) -> None:
    """A disk that is full or slow ends no service: it lets health checks fail, and says so."""
    if not (path := host.settings.service.state_file):
        return
    state = str(host.beat.state) if host.bus.up.is_set() else "the message bus is away"
    try:
        await asyncio.to_thread(write_state, path, host.id, state)
    except OSError as error:
        _log.warning("service.state_file %s: %s; health checks will fail", path, error.strerror)


async def answer_asks(host: ServiceHost) -> None:
    """Sends a heartbeat soon when somebody new wants to know who is there."""
    inbox = await host.bus.inbox(subjects.ask(), Ask, limit=ASKS_LIMIT)
    async for _ in inbox:
        await asyncio.sleep(random.uniform(0, ASK_JITTER_S))
        host.touch()


async def send_snapshots(host: ServiceHost) -> None:
    """Sends the registry every `metrics.interval_ms`, for ever."""
    interval_s = host.settings.metrics.interval_ms / 1000
    while True:
        await host.publish_snapshot()
        await asyncio.sleep(to_next(interval_s))
