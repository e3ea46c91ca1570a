"""Clients that do not take their answers: they wait alone, and are cut off in the end.

A stream's handler waits while its client's socket is full, and what comes meanwhile is merged (`Exchange`).
Here every connection that is being answered is looked at once a second, whatever it is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from baton.bus.pace import to_next
from baton.telemetry.logs import get_logger
from baton_services.gateway.web_app import REQUEST_ID

log = get_logger(__name__)

HELD = "held"  # request[HELD](): bytes that wait for this client, but for those its connection holds
LOOK_S = 1.0


@dataclass(slots=True)
class _Answer:
    """An answer on its way."""

    http: web.Request
    transport: asyncio.Transport
    taken: int  # bytes
    since: float  # it last took some, or nothing was there to take; monotonic seconds

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    @property
    def held(self) -> int:
        more: Callable[[], int] = self.http.get(HELD, int)
        return self.unsent + more()

    def over(self) -> bool:
        """Whether it is written and taken, or its connection is gone."""
        return not self.unsent and (self.http.task is None or self.transport.is_closing())

    def progress(self, now: float) -> float:
        """Seconds for which its client has taken nothing although something was there."""
        unsent = self.unsent
        taken = self.http.writer.output_size - unsent
        if taken > self.taken or not unsent:
            self.taken, self.since = taken, now
        return now - self.since


class Readers:
    """All answers on their way. `limit`: bytes that all of them together may hold for their clients."""

    def __init__(self, *, stalled_s: float, limit: int) -> None:
        self._stalled_s = stalled_s
        self._limit = limit
        self._answers: dict[int, _Answer] = {}  # by the transport's id: one a connection, the newest
        self._some = asyncio.Event()

    async def add(self, http: web.Request, _: web.StreamResponse) -> None:
        """For `Application.on_response_prepare`."""
        transport = http.transport
        if transport is not None:
            self._answers[id(transport)] = _Answer(http, transport, 0, time.monotonic())
            self._some.set()

    async def watch(self) -> None:
        """Cuts off whoever takes nothing for too long, and the largest while too much waits."""
        while True:
            if not self._answers:
                self._some.clear()
                await self._some.wait()
            await asyncio.sleep(to_next(LOOK_S))
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        for key, answer in list(self._answers.items()):
            if answer.over():
                del self._answers[key]
            elif answer.progress(now) >= self._stalled_s:
                self._cut(answer, f"took nothing for {self._stalled_s:g} s")
        sizes = {key: answer.held for key, answer in self._answers.items()}
        while sum(sizes.values()) > self._limit:
            largest = max(sizes, key=lambda key: sizes[key])
            self._cut(self._answers[largest], f"left {sizes.pop(largest)} bytes waiting, and memory is short")

    def _cut(self, answer: _Answer, why: str) -> None:
        log.info("request %s: its client %s, cut off", answer.http[REQUEST_ID], why)
        self._answers.pop(id(answer.transport), None)
        answer.transport.abort()
