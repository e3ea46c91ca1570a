"""What the block protocol of TCP looks like on the wire.

    receiver -> owner   Hello{magic, version, epoch, block_bytes, nonce}
    owner -> receiver   Challenge{nonce, proof}        the owner shows that it knows the secret
    receiver -> owner   Proof{proof}                   so does the receiver; the secret itself never travels
    owner -> receiver   Welcome{kind, message}         kind empty: go on
    receiver -> owner   Request{blocks: [[slot, generation], ...]}          may be sent ahead of the answers
    owner -> receiver   for each block: HEADER, its raw bytes if status is OK, then TRAILER

Frames are a little-endian uint32 length and a MessagePack map; HEADER and TRAILER are of fixed size, so that
a block's bytes can be received straight into their place.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import struct
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from baton.kvcache.stream import Stream

MAGIC = "baton-blocks"
VERSION = 1
MAX_REFS = 1_024  # blocks a request
MAX_FRAME = 32 * 1_024  # a request of MAX_REFS blocks is the largest frame, at 15 bytes a block
NONCE_BYTES = 16
YIELD_BYTES = 1 << 21  # some 1 ms of copying

LENGTH = struct.Struct("<I")
HEADER = struct.Struct("<IQB")  # slot, generation, Status
TRAILER = struct.Struct("<B")  # Status: OK if the block stood unchanged while it was sent
TRAILER_AND_HEADER = struct.Struct("<BIQB")

Bytes32 = Annotated[bytes, Meta(max_length=32)]
Unsigned32 = Annotated[int, Meta(ge=0, lt=2**32)]
Unsigned64 = Annotated[int, Meta(ge=0)]


class Status(enum.IntEnum):
    OK = 0
    STALE = 1  # not of this generation (any more)
    MISMATCH = 2  # of another size than the receiver's blocks


class Hello(msgspec.Struct):
    magic: Annotated[str, Meta(max_length=32)]
    version: int
    epoch: Unsigned64
    block_bytes: Annotated[int, Meta(gt=0)]
    nonce: Bytes32


class Challenge(msgspec.Struct):
    nonce: Bytes32
    proof: Bytes32


class Proof(msgspec.Struct):
    proof: Bytes32


class Welcome(msgspec.Struct):
    kind: Annotated[str, Meta(max_length=32)] = ""  # empty: welcome; else a kind of `PullError`
    message: Annotated[str, Meta(max_length=256)] = ""


class Request(msgspec.Struct):
    blocks: Annotated[list[tuple[Unsigned32, Unsigned64]], Meta(min_length=1, max_length=MAX_REFS)]


class BadFrame(ValueError):
    """Bytes that are not the frame expected, or too many of them."""


F = TypeVar("F", Hello, Challenge, Proof, Welcome, Request)


def proof(secret: str, who: str, hello: Hello, nonce: bytes) -> bytes:
    """What only a holder of `secret` can say, of this connection alone. `who` is `owner` or `receiver`."""
    said = b"".join((who.encode(), hello.nonce, nonce, hello.epoch.to_bytes(8, "little")))
    return hmac.digest(secret.encode(), said, "sha256")


def same(one: bytes, other: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(one, other)


def pack(frame: msgspec.Struct) -> bytes:
    """A frame, its length first."""
    body: bytes = msgpack.packb(msgspec.to_builtins(frame, builtin_types=(bytes,)))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray, kind: type[F]) -> F:
    """The frame in `body`, bounded and checked.

    Raises:
        BadFrame: it is none of `kind`.
    """
    try:
        plain: Any = msgpack.unpackb(
            body, max_array_len=MAX_REFS, max_map_len=8, max_bin_len=64, max_str_len=512
        )
        return msgspec.convert(plain, kind)
    except (ValueError, msgpack.UnpackException, msgspec.ValidationError, RecursionError) as error:
        raise BadFrame(f"not a {kind.__name__}: {error}") from error


class IdleTimeout:
    """A time-out that starts again with every sign of progress: `async with timeout:` and `progress()`.

    A socket that is always ready never suspends the coroutine that uses it, so `progress` also gives the
    event loop its turn, and a cancellation its chance, every `YIELD_BYTES`.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since_turn = 0
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(idle_s)

    async def __aenter__(self) -> IdleTimeout:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._timeout.__aexit__(*raised)

    async def progress(self, count: int) -> None:
        """Notes that `count` bytes have moved."""
        self._timeout.reschedule(self._loop.time() + self._idle_s)
        self._since_turn += count
        if self._since_turn >= YIELD_BYTES:
            self._since_turn = 0
            await asyncio.sleep(0)


async def receive_into(stream: Stream, view: memoryview, timeout: IdleTimeout) -> None:
    """Fills `view` with the next bytes of `stream`.

    Raises:
        ConnectionResetError: the peer closed first.
        TimeoutError: from the enclosing `timeout`, when nothing comes.
    """
    got = 0
    while got < len(view):
        count = await stream.receive_into(view[got:])
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        got += count
        await timeout.progress(count)


async def receive_frame(stream: Stream, kind: type[F], timeout: IdleTimeout) -> F:
    """The next frame of `stream`.

    Raises:
        BadFrame: too large, or none of `kind`.
        ConnectionResetError, TimeoutError: as `receive_into`.
    """
    head = bytearray(LENGTH.size)
    await receive_into(stream, memoryview(head), timeout)
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise BadFrame(f"a frame of {length} bytes, at most {MAX_FRAME}")
    body = bytearray(length)
    await receive_into(stream, memoryview(body), timeout)
    return unpack(body, kind)
