"""One process's link to the bus: publish, call, watch, receive."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from baton.bus.client import BACKOFF_MOST_S, BusClient, Receiver
from baton.bus.connecting import connect_client, shown
from baton.bus.errors import BusDown, BusRefused, CallRejected, CallTimeout, NoResponder
from baton.bus.inbox import LIMIT, Inbox
from baton.bus.replies import Each, Replies, is_503
from baton.config.settings import BusSettings
from baton.protocol.base import Message
from baton.protocol.codec import MAX_MESSAGE_BYTES, Codec, MalformedMessage, encode
from baton.protocol.errors import Code, Failure
from baton.protocol.request import Rejected

__all__ = ["Bus", "BusDown", "BusRefused", "CallRejected", "CallTimeout", "NoResponder"]

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 0.5
ECHO_TIMEOUT_S = 2.0
SETTLE_S = BACKOFF_MOST_S + 0.5  # after a reconnect others may still be on their way back
RETRY_S = 0.05
UNSENT_LIMIT = 32 * 1024 * 1024  # bytes waiting for a server that does not read
UNSENT_WAIT_S = 2.0
TOLD_LIMIT = 64
ENDING_LIMIT = 4_096

_REJECTED = Codec(Rejected)


class Bus:
    """The connection of one process. It reconnects for ever; while it is down every use raises `BusDown`.

    For `SETTLE_S` after a reconnect a 503 is not taken as a death, as the others may not be back yet: calls
    are tried again until their time-out, watchers are not told.
    """

    def __init__(self, settings: BusSettings, name: str) -> None:
        self.name = name
        self.up = asyncio.Event()
        self.down_since: float | None = None  # time.monotonic()
        self.inboxes: list[Inbox] = []
        self.malformed = 0  # answers to calls that could not be read
        self.replies_lost = 0  # answers not sent because the connection was down
        self._place = shown(settings.url)
        self._loop = asyncio.get_running_loop()
        self._subscriptions: dict[Inbox, Subscription] = {}
        self._ending: set[asyncio.Task[None]] = set()  # each bounded in time, awaited by `close`
        self._callbacks: list[Callable[[bool], None]] = []
        self._replies = Replies(settings.user)
        self._settled_at = 0.0
        self._told: set[str] = set()
        self._closing = False
        self._client: BusClient

    def __repr__(self) -> str:
        return f"Bus({self.name!r}, {self._place}, {'up' if self.up.is_set() else 'down'})"

    @classmethod
    async def connect(cls, settings: BusSettings, *, name: str, wait_s: float = 30) -> Bus:
        """A live connection; tries again while the server is absent.

        Raises:
            BusDown: no server within `wait_s`. BusRefused: it cannot be used. Both texts name the fix.
        """
        bus = cls(settings, name)
        bus._client = await connect_client(
            settings,
            name=name,
            wait_s=wait_s,
            lost=bus._lost,
            reconnected=bus._reconnected,
            error=bus._error,
        )
        bus.up.set()
        await bus._subscribe(bus._replies.subject, bus._private)
        return bus

    # Sending

    async def publish(
        self, subject: str, message: Message, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Sends a message, to whoever listens. Returning means that it is on its way, not that it arrived.

        Raises:
            BusDown: there is no connection, or the server does not read. Nothing is buffered.
            MalformedMessage: the message, with its headers, is larger than the bus takes.
        """
        await self._send(subject, encode(message), reply, headers)

    async def respond(self, reply: str, message: Message) -> None:
        """Answers on a reply subject. With the connection lost the caller knows already: it only counts."""
        try:
            await self.publish(reply, message)
        except BusDown:
            self.replies_lost += 1

    async def call(
        self,
        subject: str,
        message: Message,
        codec: Codec,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Sends a message and returns the one answer, decoded by `codec`.

        Raises:
            NoResponder: nobody listens there; at once. CallTimeout: no answer in time.
            CallRejected: the answer is `Rejected`, or malformed.
            BusDown: there is no connection, or it broke meanwhile; at once.
            MalformedMessage: the message is too large.
        """
        data = encode(message)
        deadline = self._loop.time() + timeout_s
        while True:
            answer = await self._exchange(subject, data, headers, deadline)
            if not is_503(answer):
                return self._read(answer, codec, subject)
            now = self._loop.time()
            if now >= self._settled_at or now + RETRY_S >= deadline:
                raise NoResponder(f"nobody listens on {subject}")
            await asyncio.sleep(RETRY_S)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        each: Each | None = None,
    ) -> Msg:
        """Sends bytes to what is no service of ours (JetStream) and returns the answer, as it came.

        With `each` there may be several: it takes them, and says which is the last.

        Raises:
            NoResponder, CallTimeout, BusDown, MalformedMessage: as `call`.
        """
        answer = await self._exchange(subject, data, headers, self._loop.time() + timeout_s, each)
        if is_503(answer):
            raise NoResponder(f"nobody listens on {subject}")
        return answer

    async def publish_raw(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Publishes bytes to what is no service of ours. Raises as `publish`."""
        await self._send(subject, data, reply, None)

    async def _exchange(
        self,
        subject: str,
        data: bytes,
        headers: dict[str, str] | None,
        deadline: float,
        each: Each | None = None,
    ) -> Msg:
        with self._replies.expect(deadline, each) as (reply, answer):
            await self._send(subject, data, reply, headers)
            outcome = await answer
        if outcome is None:
            raise CallTimeout(f"no answer from {subject} in time")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _read(self, answer: Msg, codec: Codec, subject: str) -> Any:
        try:
            message = codec.decode(answer.data)
        except MalformedMessage as error:
            try:
                message = _REJECTED.decode(answer.data)
            except MalformedMessage:
                self.malformed += 1
                _log.warning("malformed answer from %s: %s", subject, error)
                words = f"malformed answer from {subject}: {error}"
                raise CallRejected(Failure(code=Code.MALFORMED, message=words)) from error
        if isinstance(message, Rejected):
            raise CallRejected(message.failure)
        return message

    async def _send(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> None:
        if not self.up.is_set():
            raise BusDown(f"not connected to the NATS server at {self._place}")
        client = self._client
        if headers and len(data) + _header_bytes(headers) > client.max_payload:
            raise MalformedMessage(
                f"{len(data)} bytes and headers, the bus takes {client.max_payload} at most"
            )
        if client.pending_data_size > UNSENT_LIMIT:
            await self._wait_for_room()
        try:
            await client.publish(subject, data, reply, headers)
        except (
            nats.errors.OutboundBufferLimitError,
            nats.errors.ConnectionClosedError,
            nats.errors.ConnectionDrainingError,
        ) as error:
            raise BusDown(f"not connected to the NATS server at {self._place}") from error
        except nats.errors.MaxPayloadError as error:
            raise MalformedMessage(
                f"{len(data)} bytes, the server takes {client.max_payload} at most"
            ) from error
        except nats.errors.BadSubjectError as error:
            raise MalformedMessage(f"no subject to publish on: {subject!r}, reply {reply!r}") from error

    async def _wait_for_room(self) -> None:
        deadline = self._loop.time() + UNSENT_WAIT_S
        while self._client.pending_data_size > UNSENT_LIMIT:
            if not self.up.is_set() or self._loop.time() > deadline:
                raise BusDown(f"the NATS server at {self._place} does not take what is sent to it")
            await asyncio.sleep(0.005)

    # Noticing loss

    def watch(self, subject: str, lost: Callable[[], None]) -> str:
        """A reply subject: when a message published to `subject` with it finds nobody, `lost` is called.

        Once for each such message until `unwatch`, so `lost` is idempotent. Holds no state a message.
        Watching a subject again replaces its callback.
        """
        return self._replies.watch(subject, lost)

    def unwatch(self, subject: str) -> None:
        """Ends `watch(subject)`. Idempotent."""
        self._replies.unwatch(subject)

    def _private(self, msg: Msg) -> None:
        self._replies.arrived(msg, settled=self._loop.time() >= self._settled_at)

    # Receiving

    async def inbox(self, subject: str, *types: type[Message], limit: int = LIMIT) -> Inbox:
        """Subscribes. Once this returns, messages sent to `subject` arrive here; also after a reconnect."""
        inbox = Inbox(self, subject, types, limit)
        self._subscriptions[inbox] = await self._subscribe(subject, inbox.accept)
        self.inboxes.append(inbox)
        return inbox

    def own_subject(self) -> str:
        """A new subject that only this connection listens on, by `listen`."""
        return f"{self._replies.subject[:-1]}own.{secrets.token_hex(8)}"

    async def listen(self, subject: str, receiver: Receiver) -> None:
        """Calls `receiver`, which must be quick, with each message as it came, for as long as the bus lives.

        Raises:
            BusDown: the bus is closed.
        """
        await self._subscribe(subject, receiver)

    async def _subscribe(self, subject: str, receiver: Receiver) -> Subscription:
        try:
            subscription = await self._client.receive(subject, receiver)
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            raise BusDown("the bus is closed") from error
        if self.up.is_set():
            await self._echo()
        return subscription

    async def _echo(self) -> None:
        """Returns when the server has taken everything sent before, or the connection is lost."""
        with self._replies.expect(self._loop.time() + ECHO_TIMEOUT_S) as (own, echo):
            try:
                await self._send(own, b"", "", None)
            except BusDown:
                return
            await echo

    def forget(self, inbox: Inbox) -> None:
        """Ends an inbox's subscription; called by `Inbox.close`."""
        subscription = self._subscriptions.pop(inbox, None)
        if subscription is not None:
            self.inboxes.remove(inbox)
            self._finish(self._client.end(subscription))

    def respond_soon(self, reply: str, message: Message) -> None:
        """`respond`, from where one cannot wait."""
        if len(self._ending) < ENDING_LIMIT:
            self._finish(self.respond(reply, message))
        else:
            self.replies_lost += 1

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def jetstream(self, timeout_s: float = 5.0) -> JetStreamContext:
        """JetStream on this connection."""
        return self._client.jetstream(timeout=timeout_s)

    # Up and down

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """`callback(False)` when the connection is lost, `callback(True)` when it is back."""
        self._callbacks.append(callback)

    def _lost(self) -> None:
        if not self.up.is_set():
            return
        self.up.clear()
        self.down_since = time.monotonic()
        if not self._closing:
            _log.warning("lost the NATS server at %s; reconnecting", self._place)
        self._replies.fail(BusDown(f"the connection to the NATS server at {self._place} broke"))
        for callback in self._callbacks:
            callback(False)

    async def _reconnected(self) -> None:
        now = time.monotonic()
        _log.info("back on the NATS server at %s after %.2f s", self._place, now - (self.down_since or now))
        if self._client.max_payload < MAX_MESSAGE_BYTES:
            _log.error("the NATS server at %s now takes less than 8 MB: set `max_payload: 8MB`", self._place)
        self._client.backoff.reset()
        self._settled_at = self._loop.time() + SETTLE_S
        self.down_since = None
        self._told.clear()
        self.up.set()
        for callback in self._callbacks:
            callback(True)

    async def _error(self, error: Exception) -> None:
        """nats-py's error callback: errors of the connection, and exceptions raised in callbacks."""
        if not isinstance(error, nats.errors.Error | OSError):
            _log.error("in a bus callback", exc_info=error)
            return
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, nats.errors.UnexpectedEOF):
            _log.debug("%s", words)  # `_lost` says it
        elif words not in self._told and len(self._told) < TOLD_LIMIT:
            self._told.add(words)
            _log.warning("the bus at %s (logged once until it is back): %s", self._place, words)

    async def close(self) -> None:
        """Unsubscribes, waits until the server has what was sent, and closes. Bounded; idempotent."""
        if self._closing:
            return
        self._closing = True
        for inbox in list(self.inboxes):
            inbox.close()
        await asyncio.gather(*self._ending)
        if self.up.is_set():
            await self._echo()
        self._lost()
        self._client.abort()
        await self._client.close()


def _header_bytes(headers: dict[str, str]) -> int:
    return 12 + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())
