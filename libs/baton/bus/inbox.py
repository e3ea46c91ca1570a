"""One subscription as one ordered, bounded queue of decoded messages."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats.aio.msg import Msg

from baton.bus.replies import is_watched
from baton.protocol.base import Message
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.request import Rejected

if TYPE_CHECKING:
    from baton.bus.connection import Bus

_log = logging.getLogger(__name__)

LIMIT = 65_536  # messages
LIMIT_BYTES = 256 * 1024 * 1024
YIELD_EVERY = 64  # messages taken without a pause before the event loop gets its turn
SUBJECTS_LOGGED = 256


@dataclass(slots=True)
class Delivery:
    """A message as it arrived."""

    message: Any
    subject: str
    reply: str  # empty: nobody awaits an answer
    headers: dict[str, str] | None
    size: int  # bytes of the message
    _bus: Bus

    async def respond(self, message: Message) -> None:
        """Answers a call, if this is one. With the connection lost it only counts, in `Bus.replies_lost`."""
        if self.reply:
            await self._bus.respond(self.reply, message)


class InboxClosed(Exception):
    """The inbox is closed and everything in it has been taken."""


class Inbox:
    """An async iterator of `Delivery`, in the order in which the server sent them. Made by `Bus.inbox`.

    It holds at most `limit` messages and `LIMIT_BYTES`. Past that the newest is dropped, counted in `dropped`
    and answered `Rejected(OVERLOADED)` where an answer is awaited. A malformed message is counted in
    `malformed`, logged once a subject and answered `Rejected(MALFORMED)`.
    """

    def __init__(self, bus: Bus, subject: str, types: tuple[type[Message], ...], limit: int) -> None:
        self.subject = subject
        self.dropped = 0
        self.malformed = 0
        self._bus = bus
        self._codec = Codec(*types)
        self._limit = limit
        self._queue: deque[Delivery] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._closed = False
        self._taken = 0
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def accept(self, msg: Msg) -> None:
        """The subscription's receiver: decodes and enqueues, nothing else."""
        size = len(msg.data)
        if len(self._queue) >= self._limit or self._bytes + size > LIMIT_BYTES:
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("inbox of %s is full: new messages are refused", self.subject)
            self._refuse(msg, Code.OVERLOADED, "too many messages wait here; try again later")
            return
        try:
            message = self._codec.decode(msg.data)
        except MalformedMessage as error:
            self.malformed += 1
            if msg.subject not in self._logged and len(self._logged) < SUBJECTS_LOGGED:
                self._logged.add(msg.subject)
                _log.warning("malformed message on %s (logged once): %s", msg.subject, error)
            self._refuse(msg, Code.MALFORMED, f"malformed message: {error}")
            return
        self._queue.append(Delivery(message, msg.subject, msg.reply, msg.headers, size, self._bus))
        self._bytes += size
        self._arrived.set()

    async def get(self) -> Delivery:
        """The next message.

        Raises:
            InboxClosed: there will be none.
        """
        while not self._queue:
            if self._closed:
                raise InboxClosed(self.subject)
            self._arrived.clear()
            await self._arrived.wait()
            self._taken = 0
        self._taken += 1
        if self._taken % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        delivery = self.get_nowait()
        return delivery if delivery is not None else await self.get()

    def get_nowait(self) -> Delivery | None:
        """The next message if one is here."""
        if not self._queue:
            return None
        delivery = self._queue.popleft()
        self._bytes -= delivery.size
        return delivery

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        try:
            return await self.get()
        except InboxClosed:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Ends the subscription. What is here can still be taken; then the iteration ends. Idempotent."""
        if not self._closed:
            self.end()
            self._bus.forget(self)

    def end(self) -> None:
        """Marks the end: nothing more will come."""
        self._closed = True
        self._arrived.set()

    def _refuse(self, msg: Msg, code: Code, words: str) -> None:
        if msg.reply and not is_watched(msg.reply):
            self._bus.respond_soon(msg.reply, Rejected(failure=Failure(code=code, message=words)))
