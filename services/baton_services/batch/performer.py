"""Having gateways answer requests: one call to begin, one message with the answer."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

from baton.batch import names
from baton.bus.connection import BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.inbox import Inbox
from baton.protocol.batch import Perform, PerformCancel, Performed, PerformQuery
from baton.protocol.codec import Codec
from baton.protocol.errors import Code
from baton.protocol.liveness import Heartbeat, Role
from baton.protocol.request import Accepted, Rejected
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger

log = get_logger(__name__)

ACCEPT_S = 0.5
LOOK_S = 3.0  # a gateway is asked this often whether it is still at it
RETRY_MS = 1_000

_codec = Codec(Accepted, Rejected)


class Lost(Exception):
    """The gateway that had it is gone, or none is there: to be begun again."""


@dataclass(slots=True)
class _Running:
    gateway: tuple[str, int]
    subject: str
    done: asyncio.Future[Performed | None]  # None: its gateway is gone


class Performer:
    """The batch service's side of `Perform`."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._reply_to = names.performed(host.id, host.epoch)
        self._running: dict[str, _Running] = {}

    async def start(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self._feed(await self._host.bus.inbox(self._reply_to, Performed)))
        self._host.directory.subscribe(self._peer_changed)

    async def perform(self, endpoint: str, body: bytes, owner: str) -> Performed:
        """One request's answer, whatever its status.

        Raises:
            Lost: there is no gateway, or it went away with the request.
        """
        id = uuid.uuid4().hex
        for beat in self._gateways():
            refusal = await self._begin(id, beat, endpoint, body, owner)
            if refusal is not None:
                return refusal
            if id in self._running:
                return await self._wait(id)
        raise Lost("no gateway takes it")

    def _gateways(self) -> list[Heartbeat]:
        """Those that are ready, the one with the fewest of our requests first."""
        count: dict[tuple[str, int], int] = {}
        for running in self._running.values():
            count[running.gateway] = count.get(running.gateway, 0) + 1
        live = self._host.directory.live(Role.GATEWAY)
        return sorted(live, key=lambda beat: count.get((beat.id, beat.epoch), 0))

    async def _begin(
        self, id: str, beat: Heartbeat, endpoint: str, body: bytes, owner: str
    ) -> Performed | None:
        """Hands it to one gateway; it is in `_running` then. A refusal is returned as if it were one."""
        subject = names.performer(beat.id, beat.epoch)
        done: asyncio.Future[Performed | None] = asyncio.get_running_loop().create_future()
        self._running[id] = _Running((beat.id, beat.epoch), subject, done)
        message = Perform(id=id, reply_to=self._reply_to, endpoint=endpoint, body=body, owner=owner)
        try:
            await self._host.bus.call(subject, message, _codec, timeout_s=ACCEPT_S)
        except NoResponder:
            self._host.directory.exclude(beat.id, beat.epoch)
        except CallTimeout:
            self._host.directory.exclude(beat.id, beat.epoch)
            await self._cancel(id, subject)
        except CallRejected as error:
            del self._running[id]
            if error.failure.code is Code.DRAINING:
                return None
            wait_ms = error.failure.retry_after_ms or RETRY_MS
            return Performed(id=id, status=429, body=b"{}", retry_after_ms=wait_ms)
        except BusDown as error:
            del self._running[id]
            raise Lost(str(error)) from error
        except BaseException:
            del self._running[id]
            await self._cancel(id, subject)
            raise
        else:
            return None
        self._running.pop(id, None)
        return None

    async def _wait(self, id: str) -> Performed:
        running = self._running[id]
        try:
            while not running.done.done():
                await asyncio.wait({running.done}, timeout=LOOK_S)
                if not running.done.done():
                    await self._look(id, running)
            answer = running.done.result()
        except asyncio.CancelledError:
            await self._cancel(id, running.subject)
            raise
        finally:
            del self._running[id]
        if answer is None:
            raise Lost("its gateway is gone")
        return answer

    async def _look(self, id: str, running: _Running) -> None:
        try:
            await self._host.bus.call(running.subject, PerformQuery(id=id), _codec, timeout_s=ACCEPT_S)
        except (NoResponder, CallRejected):
            if not running.done.done():
                running.done.set_result(None)
        except (CallTimeout, BusDown):
            return  # its heartbeats tell whether it lives

    async def _cancel(self, id: str, subject: str) -> None:
        try:
            await self._host.bus.publish(subject, PerformCancel(id=id))
        except BusDown:
            log.debug("request %s given up while the bus was away", id)

    async def _feed(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            answer: Performed = delivery.message
            running = self._running.get(answer.id)
            if running is not None and not running.done.done():
                running.done.set_result(answer)

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if beat.role is Role.GATEWAY and kind == "left":
            for running in self._running.values():
                if running.gateway == (beat.id, beat.epoch) and not running.done.done():
                    running.done.set_result(None)


def backoff_s(tries: int) -> float:
    """A pause before the next attempt: 0.1 s, doubling, 5 s at most."""
    return min(5.0, 0.1 * 2 ** min(tries, 10))
