"""Requests that come over the bus instead of HTTP: answered by this gateway's own handlers.

They go through a socket of our own, so that a request of a batch is read, checked and answered as any other,
whatever its endpoint; a secret of this process tells them from those of clients.
"""

from __future__ import annotations

import asyncio
import secrets

import aiohttp
from aiohttp import web

from baton.batch import names
from baton.bus.inbox import Delivery, Inbox
from baton.bus.stored import AWAY, patiently
from baton.protocol.batch import Perform, PerformCancel, Performed, PerformQuery
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.request import Accepted, Rejected
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton_services.gateway.keys import INTERNAL, INTERNAL_HEADER, OWNER_HEADER

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
DELIVER_S = 30.0  # for an answer, while the bus is away


class Performing:
    """Takes `Perform`s, as many as come; the gateway's own limits refuse what is too much."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._secret = secrets.token_hex(16)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._url = ""
        self._session: aiohttp.ClientSession | None = None

    def mount(self, app: web.Application) -> None:
        app[INTERNAL] = self._secret

    async def start(self, group: asyncio.TaskGroup, runner: web.AppRunner) -> None:
        """Listens on the socket and on the bus."""
        before = len(runner.addresses)
        await web.TCPSite(runner, LOOPBACK, 0, backlog=1_024).start()
        self._url = f"http://{LOOPBACK}:{runner.addresses[before][1]}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        self._group = group
        subject = names.performer(self._host.id, self._host.epoch)
        inbox = await self._host.bus.inbox(subject, Perform, PerformQuery, PerformCancel)
        group.create_task(self._serve(inbox))

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _serve(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            match delivery.message:
                case Perform() as asked:
                    await self._take(asked, delivery)
                case PerformQuery(id=id):
                    await delivery.respond(Accepted() if id in self._running else _STALE)
                case PerformCancel(id=id):
                    task = self._running.get(id)
                    if task is not None:
                        task.cancel()

    async def _take(self, asked: Perform, delivery: Delivery) -> None:
        if self._host.stopping.is_set():
            await delivery.respond(_DRAINING)
            return
        if asked.id not in self._running:
            self._running[asked.id] = self._group.create_task(self._perform(asked))
        await delivery.respond(Accepted())

    async def _perform(self, asked: Perform) -> None:
        try:
            answer = await self._answer(asked)
            await patiently(lambda: self._send(asked.reply_to, answer), for_s=DELIVER_S)
        except AWAY:
            log.warning("the answer to %s could not be sent: the bus is away", asked.id)
        except asyncio.CancelledError:
            if not self._cancelled(asked.id):
                raise
        finally:
            self._running.pop(asked.id, None)

    def _cancelled(self, id: str) -> bool:
        """Whether only this request is given up, and not the whole process."""
        task = asyncio.current_task()
        return task is not None and not self._host.stopping.is_set() and id in self._running

    async def _send(self, reply_to: str, answer: Performed) -> None:
        try:
            await self._host.bus.publish(reply_to, answer)
        except MalformedMessage:
            words = b'{"error":{"message":"the answer is larger than a message may be","type":"server_error",'
            body = words + b'"param":null,"code":"answer_too_large"}}'
            await self._host.bus.publish(reply_to, Performed(id=answer.id, status=413, body=body))

    async def _answer(self, asked: Perform) -> Performed:
        assert self._session is not None
        headers = {
            "Content-Type": "application/json",
            INTERNAL_HEADER: self._secret,
            OWNER_HEADER: asked.owner,
        }
        try:
            async with self._session.post(
                self._url + asked.endpoint, data=asked.body, headers=headers
            ) as response:
                body = await response.read()
                return Performed(
                    id=asked.id,
                    status=response.status,
                    body=body,
                    request_id=response.headers.get("x-request-id", ""),
                    retry_after_ms=_number(response.headers.get("retry-after-ms", "")),
                )
        except aiohttp.ClientError as error:
            log.info("request %s broke off: %s", asked.id, error)
            return Performed(id=asked.id, status=503, body=b"{}")
        except Exception:
            log.exception("request %s failed", asked.id)
            return Performed(id=asked.id, status=500, body=b"{}")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


_STALE = Rejected(failure=Failure(code=Code.STALE, message="there is no such request here"))
_DRAINING = Rejected(failure=Failure(code=Code.DRAINING, message="this gateway is shutting down"))
