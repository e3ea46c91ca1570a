"""What lasts: messages that JetStream keeps, written, found, counted and taken as work.

Built on `Bus.request`, so that a lost connection is known at once and a call can simply be made again.
The protocol: https://docs.nats.io/reference/reference-protocols/nats_api_reference
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from nats.aio.msg import Msg

from baton.bus.connection import Bus, BusDown, CallTimeout, NoResponder

API = "$JS.API"
TIMEOUT_S = 5.0
PAGE = 256  # messages read at once
PAGE_BYTES = 4 * 2**20
PULL_BYTES = 16 * 2**20  # more than the largest message
COUNTER_IDLE_S = 120
WRONG_SEQUENCE = 10_071
_NOT_FOUND = 404
_EXISTS = 10_058  # a stream of that name, configured otherwise


AWAY = (BusDown, CallTimeout, NoResponder)  # the server is not there; it may come back

T = TypeVar("T")


class StoreError(Exception):
    """JetStream refuses. `code` is like HTTP's, `err_code` its own."""

    def __init__(self, words: str, code: int = 0, err_code: int = 0) -> None:
        super().__init__(words)
        self.code = code
        self.err_code = err_code


class WrongSequence(StoreError):
    """Somebody else has written to the subject meanwhile."""


@dataclass(slots=True, frozen=True)
class Stored:
    """A message as it is kept."""

    subject: str
    data: bytes
    seq: int
    headers: dict[str, str]

    @property
    def time(self) -> float:
        """When it was stored; Unix seconds of the server's clock."""
        stamp = self.headers["Nats-Time-Stamp"]
        head, _, fraction = stamp.rstrip("Z").partition(".")
        return datetime.fromisoformat(f"{head}.{fraction[:6]:0<6}+00:00").timestamp()


class Streams:
    """JetStream on one bus.

    Every method raises `BusDown`, `CallTimeout` or `NoResponder` when the server is away, and `StoreError`
    when it refuses; all may be called again, and then do or find the same.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def ensure(self, name: str, **config: Any) -> None:
        """Makes a stream, or brings one that is there to this configuration."""
        body = {"name": name, "storage": "file", "retention": "limits", "allow_direct": True, **config}
        try:
            await self._call(f"STREAM.CREATE.{name}", body)
        except StoreError as error:
            if error.err_code != _EXISTS:
                raise
            await self._call(f"STREAM.UPDATE.{name}", body)

    async def publish(
        self, subject: str, data: bytes, *, expect: int | None = None, headers: dict[str, str] | None = None
    ) -> int:
        """Stores a message; its sequence number. `expect`: only if that of the subject's last one is this.

        Raises:
            WrongSequence: it is another one.
        """
        if expect is not None:
            headers = {**(headers or {}), "Nats-Expected-Last-Subject-Sequence": str(expect)}
        answer = await self.bus.request(subject, data, headers=headers, timeout_s=TIMEOUT_S)
        return int(_checked(answer)["seq"])

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message of a subject."""
        answer = await self.bus.request(f"{API}.DIRECT.GET.{stream}.{subject}", b"", timeout_s=TIMEOUT_S)
        return _stored(answer)

    async def page(
        self, stream: str, subject: str, *, after: int = 0, limit: int = PAGE, max_bytes: int = PAGE_BYTES
    ) -> list[Stored]:
        """The first messages of a subject (wildcards allowed) whose sequence numbers are above `after`."""
        found: list[Stored] = []

        def take(answer: Msg) -> bool:
            item = _stored(answer)
            if item is None:
                return True
            found.append(item)
            return False

        body = {"seq": after + 1, "next_by_subj": subject, "batch": limit, "max_bytes": max_bytes}
        await self.bus.request(
            f"{API}.DIRECT.GET.{stream}", msgspec.json.encode(body), timeout_s=TIMEOUT_S, each=take
        )
        return found

    async def scan(self, stream: str, subject: str, *, after: int = 0) -> AsyncIterator[Stored]:
        """All of them, a page at a time."""
        while found := await self.page(stream, subject, after=after):
            for item in found:
                yield item
            after = found[-1].seq

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """The subjects that hold messages and match."""
        found: list[str] = []
        while True:
            body = {"subjects_filter": pattern, "offset": len(found)}
            info = await self._call(f"STREAM.INFO.{stream}", body)
            some = info["state"].get("subjects") or {}
            found += some
            if not some or len(found) >= info.get("total", 0):
                return found

    async def size(self, stream: str) -> int:
        """Bytes that a stream takes."""
        info = await self._call(f"STREAM.INFO.{stream}", {})
        return int(info["state"]["bytes"])

    async def purge(self, stream: str, pattern: str) -> None:
        """Deletes every message of the subjects that match."""
        await self._call(f"STREAM.PURGE.{stream}", {"filter": pattern})

    async def delete(self, stream: str, seq: int) -> None:
        """Deletes one message; none there is as good."""
        try:
            await self._call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except StoreError as error:
            if error.code not in (_NOT_FOUND, 500, 400):
                raise

    async def consumer(self, stream: str, name: str, subject: str, **config: Any) -> dict[str, Any]:
        """Makes a pull consumer, or finds it; what JetStream tells of it."""
        body = {"name": name, "filter_subject": subject, "deliver_policy": "all", **config}
        path = f"CONSUMER.CREATE.{stream}.{name}.{subject}"
        return await self._call(path, {"stream_name": stream, "config": body})

    async def consumer_info(self, stream: str, name: str) -> dict[str, Any]:
        return await self._call(f"CONSUMER.INFO.{stream}.{name}", {})

    async def count(self, stream: str, subject: str) -> int:
        """How many messages the subjects that match hold: what lies before a consumer that takes none."""
        name = f"count-{hashlib.sha256(subject.encode()).hexdigest()[:16]}"
        try:
            info = await self.consumer_info(stream, name)
        except StoreError as error:
            if error.code != _NOT_FOUND:
                raise
            idle = COUNTER_IDLE_S * 10**9
            info = await self.consumer(
                stream, name, subject, ack_policy="none", mem_storage=True, inactive_threshold=idle
            )
        return int(info["num_pending"])

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return _checked(
            await self.bus.request(f"{API}.{path}", msgspec.json.encode(body), timeout_s=TIMEOUT_S)
        )


async def patiently(call: Callable[[], Awaitable[T]], *, for_s: float = float("inf")) -> T:
    """Makes a call that may be made again, until the server is there.

    Raises:
        BusDown, CallTimeout, NoResponder: it was away for `for_s` seconds. Whatever else the call raises.
    """
    until, pause_s = time.monotonic() + for_s, 0.05
    while True:
        try:
            return await call()
        except AWAY:
            if time.monotonic() + pause_s >= until:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(1.0, pause_s * 1.5)


class Work:
    """One end of a pull consumer: takes its messages, which whoever takes them acknowledges.

    One `pull` at a time.
    """

    def __init__(self, bus: Bus, stream: str, consumer: str) -> None:
        self._bus = bus
        self._consumer = f"{consumer} of {stream}"
        self._next = f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = bus.own_subject()
        self._found: list[Msg] = []
        self._status = ""
        self._arrived = asyncio.Event()

    async def open(self) -> None:
        await self._bus.listen(self._inbox, self._take)
        self._bus.on_change(lambda up: self._arrived.set())

    def _take(self, msg: Msg) -> None:
        headers = msg.headers or {}
        if not msg.data and "Status" in headers and msg.subject == self._inbox:
            self._status = f"{headers['Status']} {headers.get('Description', '')}"
        else:
            self._found.append(msg)
        self._arrived.set()

    async def pull(self, limit: int, *, wait_s: float = 0.0) -> list[Msg]:
        """Up to about `limit` messages; with `wait_s`, waits that long for the first one.

        Raises:
            BusDown: the connection is lost. CallTimeout, StoreError: there is no such consumer (any more).
        """
        wanted: dict[str, Any] = {"no_wait": True, "batch": limit, "max_bytes": PULL_BYTES}
        if wait_s:
            wanted = {"expires": int(wait_s * 1e9), "batch": 1}
        self._status = ""
        await self._bus.publish_raw(self._next, msgspec.json.encode(wanted), reply=self._inbox)
        deadline = time.monotonic() + wait_s + TIMEOUT_S
        while not self._status and len(self._found) < wanted["batch"]:
            self._arrived.clear()
            if not self._bus.up.is_set():
                raise BusDown("the bus went away while work was awaited")
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._arrived.wait()
            except TimeoutError as error:
                raise CallTimeout(f"no answer from {self._consumer} in time") from error
        found, self._found = self._found, []
        if not found and self._status[:3] not in ("404", "408"):
            raise StoreError(f"{self._consumer}: {self._status}", 409)
        return found

    async def done(self, msg: Msg) -> None:
        """Acknowledges, and returns once the server knows it."""
        await self._bus.request(msg.reply, b"+ACK", timeout_s=TIMEOUT_S)

    async def going_on(self, msg: Msg) -> None:
        """Says that it is still being worked on."""
        await self._bus.publish_raw(msg.reply, b"+WPI")

    async def again(self, msg: Msg, delay_s: float) -> None:
        """Gives it back, to be handed out again after `delay_s`."""
        delay = msgspec.json.encode({"delay": int(delay_s * 1e9)})
        await self._bus.publish_raw(msg.reply, b"-NAK " + delay)


def delivered(msg: Msg) -> int:
    """How often this message of work has been handed out, from its acknowledgement subject."""
    tokens = msg.reply.split(".")
    return int(tokens[4] if len(tokens) < 12 else tokens[6])


def sequence(msg: Msg) -> int:
    """A message of work's number in its stream."""
    tokens = msg.reply.split(".")
    return int(tokens[5] if len(tokens) < 12 else tokens[7])


def _checked(answer: Msg) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(answer.data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise StoreError(f"an answer of JetStream that is none: {error}") from error
    if "error" in body:
        what = body["error"]
        kind = WrongSequence if what.get("err_code") == WRONG_SEQUENCE else StoreError
        raise kind(what.get("description", "refused"), what.get("code", 0), what.get("err_code", 0))
    return body


def _stored(answer: Msg) -> Stored | None:
    """A message of a direct get; None at the end of a page and where there is none."""
    headers = answer.headers or {}
    status = headers.get("Status", "")
    if status in ("204", "404"):
        return None
    if status:
        raise StoreError(headers.get("Description", "refused"), int(status) if status.isdecimal() else 0)
    return Stored(headers["Nats-Subject"], answer.data, int(headers["Nats-Sequence"]), headers)
