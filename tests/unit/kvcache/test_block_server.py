"""The TCP transport's two ends against peers that lie, stall, flood, or overwrite in the middle."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from baton.kvcache import wire
from baton.kvcache.pool import KvPool, checksum
from baton.kvcache.transports import BlockServer, Puller, PullError, host_id
from baton.protocol.handoff import Address, BlockRef
from baton.protocol.liveness import Geometry

SECRET = "0123456789abcdef"
EPOCH = 5
BYTES = 4_096
SHAPE = Geometry(block_size=16, block_bytes=BYTES)


class Source:
    """A pool whose blocks go stale after so many looks."""

    def __init__(self) -> None:
        self.block = bytes(range(256)) * (BYTES // 256)
        self.looks_left = 1_000_000

    def resolve(self, slot: int, generation: int) -> memoryview | None:
        self.looks_left -= 1
        return memoryview(self.block) if self.looks_left >= 0 and generation == 0 else None


class Ends:
    """Both ends in one process."""

    def __init__(self, port: int, source: Source, server: BlockServer) -> None:
        self.port, self.source, self.server = port, source, server
        self.pool = KvPool.create_private(SHAPE, 2_048)
        self.puller = Puller(self.pool, shm_dir="/dev/shm", transports=["tcp"], idle_s=0.5)

    async def pull(self, count: int = 1, *, port: int = 0, secret: str = SECRET) -> None:
        address = Address(host="", tcp_host="127.0.0.1", tcp_port=port or self.port, transports=["tcp"])
        refs = [BlockRef(slot, 0, checksum(self.source.block)) for slot in range(count)]
        await self.puller.pull(address, secret, EPOCH, refs, range(count))


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    source = Source()
    server = BlockServer(source, secret=SECRET, epoch=EPOCH, idle_s=0.5)
    ends = Ends(await server.start("127.0.0.1"), source, server)
    yield ends
    ends.puller.close()
    ends.pool.close()
    await server.stop()


async def test_more_blocks_than_one_request_holds(ends: Ends) -> None:
    count = wire.MAX_REFS + 500
    await ends.pull(count)
    assert (ends.pool.data[:count] == np.frombuffer(ends.source.block, dtype=np.uint8)).all()
    assert not ends.pool.data[count:].any()


@pytest.mark.parametrize(("looks", "done"), [(0, 0), (1, 0), (2, 1), (5, 2)])
async def test_a_block_overwritten_before_or_while_it_is_sent_is_stale(
    ends: Ends, looks: int, done: int
) -> None:
    ends.source.looks_left = looks  # two looks a block: before and after sending
    with pytest.raises(PullError) as caught:
        await ends.pull(4)
    assert (caught.value.kind, caught.value.done) == ("stale", done)


async def test_overwritten_while_copied_from_shared_memory_is_stale() -> None:
    owner = KvPool.create("/dev/shm", f"test-block-server-{id(object())}", SHAPE, 2, epoch=EPOCH)

    class Into:
        block_bytes = BYTES

        def view(self, slot: int) -> memoryview:
            owner.generations[1] += slot  # after the first look, before the copy has ended
            return memoryview(bytearray(BYTES))

    puller = Puller(Into(), shm_dir="/dev/shm")
    try:
        address = Address(host=host_id("/dev/shm"), path=owner.path)
        refs = [BlockRef(slot, 0, checksum(bytes(BYTES))) for slot in range(2)]
        with pytest.raises(PullError) as caught:
            await puller.pull(address, SECRET, EPOCH, refs, [0, 1])
        assert (caught.value.kind, caught.value.done) == ("stale", 1)
    finally:
        puller.close()
        owner.close()


async def test_slots_and_blocks_must_pair_up(ends: Ends) -> None:
    address = Address(host="", tcp_host="127.0.0.1", tcp_port=ends.port)
    refs = [BlockRef(0, 0, 0), BlockRef(1, 0, 0)]
    for dest in ([0], [0, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="2 blocks for"):
            await ends.puller.pull(address, SECRET, EPOCH, refs, dest)
    assert (await ends.puller.pull(address, SECRET, EPOCH, [], [])).transport == "none"


async def test_a_short_secret_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="16 characters"):
        BlockServer(Source(), secret="", epoch=EPOCH)


async def test_a_taken_port_is_one_clear_error(ends: Ends) -> None:
    other = BlockServer(Source(), secret=SECRET, epoch=EPOCH)
    with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{ends.port}"):
        await other.start("127.0.0.1", ends.port)


HELLO = wire.Hello(magic=wire.MAGIC, version=wire.VERSION, epoch=EPOCH, block_bytes=BYTES, nonce=b"n" * 16)
OLD = wire.Hello(magic=wire.MAGIC, version=99, epoch=EPOCH, block_bytes=BYTES, nonce=b"n" * 16)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 2**31) + b"x" * 64,
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x80",
        wire.pack(OLD),
        wire.pack(wire.Welcome()),
    ],
)
async def test_nonsense_at_the_door_closes_that_connection_only(
    ends: Ends, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="baton.kvcache"):
        reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
        writer.write(sent)
        assert await _closed(reader)
        writer.close()
    assert len(caplog.records) == 1
    await ends.pull()


async def test_a_wrong_proof_is_turned_away_with_one_line(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="baton.kvcache"):
        reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
        writer.write(wire.pack(HELLO) + wire.pack(wire.Proof(proof=b"x" * 32)))
        assert await _closed(reader)
        writer.close()
    assert [record.message.split(": ", 1)[1].split(" ", 1)[1] for record in caplog.records] == [
        "refused: wrong secret"
    ]
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<I", wire.MAX_FRAME + 1) + b"x" * 100,
        wire.pack(wire.Request(blocks=[(0, 0)] * (wire.MAX_REFS + 1))),
        wire.pack(wire.Request(blocks=[])),
        wire.pack(wire.Request(blocks=[(2**40, 0)])),
    ],
)
async def test_a_request_beyond_bounds_closes_the_connection(ends: Ends, request_bytes: bytes) -> None:
    reader, writer = await _enter(ends.port)
    writer.write(request_bytes)
    assert await _closed(reader)
    writer.close()
    await ends.pull()


async def test_a_receiver_that_takes_nothing_is_dropped(ends: Ends) -> None:
    ends.source.block = bytes(8 << 20)
    _, writer = await _enter(ends.port, block_bytes=8 << 20)  # nobody reads: its buffer fills
    writer.write(wire.pack(wire.Request(blocks=[(slot, 0) for slot in range(100)])))
    await asyncio.sleep(1.2)
    assert ends.server.connections == 0
    writer.close()


async def test_connections_are_bounded(ends: Ends) -> None:
    writers = []
    for _ in range(260):
        _, writer = await asyncio.open_connection("127.0.0.1", ends.port)
        writers.append(writer)
    await asyncio.sleep(0.1)
    assert ends.server.connections == 256
    for writer in writers:
        writer.close()
    await asyncio.sleep(0.2)
    await ends.pull()


async def _serve(answer: Callable[[bytes], list[bytes]]) -> tuple[asyncio.Server, int]:
    """A hostile owner: `answer` gets the hello's body and gives what to send, a piece for each frame read."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        pieces = answer(await reader.readexactly(length))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        await asyncio.sleep(5)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def _honest_door(hello: bytes) -> list[bytes]:
    parsed = wire.unpack(hello, wire.Hello)
    mine = wire.proof(SECRET, "owner", parsed, b"o" * 16)
    return [wire.pack(wire.Challenge(nonce=b"o" * 16, proof=mine)), wire.pack(wire.Welcome())]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda hello: [], "timeout"),
        (lambda hello: [b"\xff" * 64], "unreachable"),
        (
            lambda hello: [wire.pack(wire.Challenge(nonce=b"n", proof=b"p" * 32)), wire.pack(wire.Welcome())],
            "refused",
        ),
        (lambda hello: [*_honest_door(hello)], "timeout"),
        (lambda hello: [*_honest_door(hello), wire.HEADER.pack(9, 0, 0) + bytes(BYTES)], "mismatch"),
        (lambda hello: [*_honest_door(hello), wire.HEADER.pack(0, 0, 77)], "stale"),
        (lambda hello: [*_honest_door(hello), wire.HEADER.pack(0, 0, 2)], "mismatch"),
        (lambda hello: [*_honest_door(hello), wire.HEADER.pack(0, 0, 0) + bytes(BYTES) + b"\0"], "checksum"),
        (lambda hello: [*_honest_door(hello), wire.HEADER.pack(0, 0, 0) + bytes(BYTES - 1)], "timeout"),
    ],
)
async def test_an_owner_that_lies_or_stalls_is_a_named_error(
    ends: Ends, answer: Callable[[bytes], list[bytes]], kind: str
) -> None:
    server, port = await _serve(answer)
    async with server:
        with pytest.raises(PullError) as caught:
            await ends.pull(port=port)
        assert (caught.value.kind, caught.value.done) == (kind, 0)
        server.close()


async def test_nobody_there_is_unreachable(ends: Ends) -> None:
    await ends.server.stop()
    with pytest.raises(PullError) as caught:
        await ends.pull()
    assert caught.value.kind == "unreachable"


async def test_a_restarted_owner_is_reached_again(ends: Ends) -> None:
    await ends.pull()
    await ends.server.stop()
    server = BlockServer(ends.source, secret=SECRET, epoch=EPOCH)
    await server.start("127.0.0.1", ends.port)
    await ends.pull()  # the kept connection is dead; a new one is made
    await server.stop()


async def _enter(port: int, block_bytes: int = BYTES) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An authenticated connection, by hand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    hello = wire.Hello(
        magic=wire.MAGIC, version=wire.VERSION, epoch=EPOCH, block_bytes=block_bytes, nonce=b"n" * 16
    )
    writer.write(wire.pack(hello))
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    challenge = wire.unpack(await reader.readexactly(length), wire.Challenge)
    writer.write(wire.pack(wire.Proof(proof=wire.proof(SECRET, "receiver", hello, challenge.nonce))))
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    assert wire.unpack(await reader.readexactly(length), wire.Welcome).kind == ""
    return reader, writer


async def _closed(reader: asyncio.StreamReader) -> bool:
    """Whether the peer closes, after whatever it may have said."""
    async with asyncio.timeout(3):
        try:
            await reader.read(-1)
        except ConnectionResetError:
            return True
    return reader.at_eof()
