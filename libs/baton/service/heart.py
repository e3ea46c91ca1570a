"""What the host does all the time: heartbeats, answers to `Ask`, metric snapshots."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from baton.bus.pace import to_next
from baton.protocol import subjects
from baton.protocol.liveness import Ask
from baton.service.base import HEARTBEAT_S, ServiceHost
from baton.telemetry.state_file import write_state

COALESCE_S = 0.02  # touches this close together make one heartbeat
ASK_JITTER_S = 0.05  # so that a whole cluster does not answer one `Ask` in the same instant

ASKS_LIMIT = 64  # more asks at once than that are answered by the same few heartbeats


async def beat(host: ServiceHost, check: Callable[[], None]) -> None:
    """Sends heartbeats for ever; calls `check` each second, which raises to end the process."""
    while True:
        host.touched.clear()
        await host.announce()
        check()
        if path := host.settings.service.state_file:
            up = host.bus.up.is_set()
            write_state(path, host.id, str(host.beat.state) if up else "the message bus is away")
        try:
            async with asyncio.timeout(to_next(HEARTBEAT_S)):
                await host.touched.wait()
        except TimeoutError:
            continue
        await asyncio.sleep(COALESCE_S)


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
