"""nats-py, bent to the rules of the bus: it never gives up, and says at once that the connection is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from baton.bus.pace import to_next
from baton.bus.wire import Deliver, Wire, read_headers

_log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.05
BACKOFF_EARLY_S = 0.2
EARLY_TRIES = 11  # which take about two seconds
BACKOFF_MOST_S = 1.0
PING_INTERVAL_S = 1
PINGS_OUT = 2
END_TIMEOUT_S = 2.0
WRITE_MOST = 65_536  # unsent bytes up to which a message is written at once

Receiver = Callable[[Msg], None]


class Backoff:
    """Waits between attempts: from 50 ms to 1 s, each shortened by up to a quarter at random.

    No wait of the first two seconds is longer than 0.2 s: a bus that is back by then was only a pause, and
    finding it late would end what is live.
    """

    def __init__(self) -> None:
        self._tries = 0

    def reset(self) -> None:
        self._tries = 0

    @property
    def tries(self) -> int:
        return self._tries

    def next_s(self) -> float:
        early = min(BACKOFF_EARLY_S, BACKOFF_FIRST_S * 2 ** min(self._tries, 16))
        late = BACKOFF_EARLY_S * 2 ** min(self._tries - EARLY_TRIES, 16)
        delay = early if self._tries <= EARLY_TRIES else min(BACKOFF_MOST_S, late)
        self._tries += 1
        return delay * random.uniform(0.75, 1.0)


class BusClient(Client):
    """A nats-py client for which every lost connection is a reconnect, reported as it happens.

    Some of nats-py's internal methods are extended, as it has no hooks there: it closes for good on most
    errors of the server, it reports a lost connection only when the old socket is flushed, which a frozen
    server never lets happen, and a PONG whose flush was given up ends its reading task. Messages
    reach their receivers through `Wire`.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        super().__init__()
        self._lost = lost
        self._receivers: dict[int, Deliver] = {}  # by subscription id
        self._socket: asyncio.WriteTransport | None = None  # while it can be written to past nats-py
        self._ready: list[bytes] = []  # to be written at the end of this turn of the event loop
        self._ready_bytes = 0
        self.backoff = Backoff()

    async def receive(self, subject: str, receiver: Receiver) -> Subscription:
        """Subscribes; `receiver` is called with each message as it is read, in order. It must be quick."""

        def deliver(subject: str, reply: str, data: bytes, headers: dict[str, str] | None) -> None:
            try:
                receiver(Msg(self, subject, reply, data, headers))
            except Exception:
                _log.exception("in the receiver of %s", subject)

        self._receivers[self._sid + 1] = deliver  # the id that `subscribe` takes next, before it waits
        return await self.subscribe(subject)

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """As nats-py's; plain messages of one turn of the event loop go out in one write at its end."""
        socket, names = self._socket, f"{subject} {reply} " if reply else f"{subject} "
        plain = not headers and names.isprintable() and names.count(" ") == (2 if reply else 1)
        if (
            socket is None
            or not plain
            or not subject
            or self._pending
            or not self.is_connected
            or len(payload) > self._max_payload
            or self._ready_bytes + socket.get_write_buffer_size() > WRITE_MOST
        ):
            self._write_ready()
            await super().publish(subject, payload, reply, headers)
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._write_ready)
        self._ready.append(b"PUB %b%d\r\n%b\r\n" % (names.encode(), len(payload), payload))
        self._ready_bytes += len(payload)

    def _write_ready(self) -> None:
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        if ready and self._socket is not None:
            self._socket.write(b"".join(ready))

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        transport = self._transport
        if isinstance(transport, TcpTransport) and transport._io_writer is not None:
            socket = self._socket = transport._io_writer.transport
            rest = socket.get_protocol()
            assert isinstance(rest, asyncio.Protocol)
            wire = Wire(rest, self._receivers)
            socket.set_protocol(wire)
            # What the stream has read already, and nobody has taken from it, comes first.
            unread: bytearray = getattr(transport._io_reader, "_buffer", bytearray())
            begun = bytes(unread)
            unread.clear()
            wire.data_received(begun)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """What did not come through `Wire`, on another transport than TCP."""
        deliver = self._receivers.get(sid)
        if deliver is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            shown = read_headers(headers) if headers else None
            deliver(subject.decode(), reply.decode(), data, shown)

    def choose(self, servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        """nats-py's `reconnect_to_server_handler`: the servers in turn, with back-off."""
        server = servers[self.backoff.tries % len(servers)]
        return server, self.backoff.next_s()

    async def _attempt_reconnect(self) -> None:
        self._socket = None
        self._write_ready()
        self._lost()
        # What was not sent when the connection broke is not sent later: its callers have been told.
        self._pending = []
        self._pending_data_size = 0
        self.abort()
        await super()._attempt_reconnect()

    async def _ping_interval(self) -> None:
        """As nats-py's, at moments that the host's processes share."""
        while True:
            await asyncio.sleep(to_next(PING_INTERVAL_S))
            if not self.is_connected:
                continue
            self._pings_outstanding += 1
            if self._pings_outstanding > PINGS_OUT:
                await self._process_op_err(nats.errors.StaleConnectionError())
                return
            try:
                await self._send_ping()
            except (
                RuntimeError,
                AttributeError,
            ):  # the socket is gone: the next has its own
                return

    async def _process_err(self, err_msg: str) -> None:
        error = nats.errors.Error("nats: " + err_msg.strip("'"))
        await self._error_cb(error)
        if "permissions violation" not in err_msg:
            await self._process_op_err(error)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def end(self, subscription: Subscription) -> None:
        """Ends a subscription. What the server had sent before still reaches its callback."""
        try:
            if self.is_connected:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await subscription.drain()
        except (TimeoutError, nats.errors.Error) as error:
            _log.debug("unsubscribing from %s: %s", subscription.subject, error)
        finally:
            subscription._stop_processing()
            self._remove_sub(subscription._id)
            self._receivers.pop(subscription._id, None)

    def abort(self) -> None:
        """Drops the socket with whatever is unsent on it."""
        transport = self._transport
        if isinstance(transport, TcpTransport) and transport._io_writer is not None:
            transport._io_writer.transport.abort()
