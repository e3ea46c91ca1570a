"""Pulling KV blocks between two real processes: right bytes, or a named error; never something in between."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from baton.kvcache.pool import KvPool, checksum
from baton.kvcache.transports import Puller, PullError, host_id
from baton.protocol.handoff import Address, BlockRef
from baton.protocol.liveness import Geometry

SECRET = "0123456789abcdef"
EPOCH = 41
BYTES = 65_536
BLOCKS = 64


class Owner:
    """A worker process with a pool."""

    def __init__(self, directory: Path, *, block_bytes: int = BYTES, blocks: int = BLOCKS) -> None:
        self.directory = directory
        self.block_bytes = block_bytes
        script = str(Path(__file__).with_name("kv_owner.py"))
        arguments = [str(directory), "owner", str(EPOCH), str(block_bytes), str(blocks), SECRET]
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = json.loads(self._line())
        self.path, self.port = told["path"], told["port"]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, *command: object) -> None:
        assert self.process.stdin is not None
        print(*command, file=self.process.stdin, flush=True)
        assert self._line() == "done\n"

    def address(self, *transports: str) -> Address:
        return Address(
            host=host_id(self.directory),
            path=self.path,
            tcp_host="127.0.0.1",
            tcp_port=self.port,
            transports=list(transports),
        )

    def refs(self, count: int, generation: int = 0) -> list[BlockRef]:
        return [BlockRef(s, generation, self.sum(s, generation)) for s in range(count)]

    def sum(self, slot: int, generation: int) -> int:
        return checksum(bytes([(slot + generation) % 251]) * self.block_bytes)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def owner(directory: Path) -> Iterator[Owner]:
    owner = Owner(directory)
    yield owner
    owner.end()


class Receiver:
    def __init__(self, directory: Path, block_bytes: int = BYTES, blocks: int = BLOCKS) -> None:
        geometry = Geometry(block_size=16, block_bytes=block_bytes)
        self.pool = KvPool.create(directory, "receiver", geometry, blocks, epoch=7)
        self.puller = Puller(self.pool, shm_dir=directory, idle_s=1.0)


@pytest.fixture
async def receiver(directory: Path) -> AsyncIterator[Receiver]:
    receiver = Receiver(directory)
    yield receiver
    receiver.puller.close()
    receiver.pool.close()


BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])


@BOTH
async def test_blocks_arrive_whole_and_in_place(owner: Owner, receiver: Receiver, transport: str) -> None:
    for count in (1, 2, 17, 64):
        receiver.pool.data[:] = 0
        dest = list(range(BLOCKS - 1, BLOCKS - 1 - count, -1))
        stats = await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, owner.refs(count), dest)
        assert (stats.bytes, stats.transport) == (count * BYTES, transport)
        assert stats.seconds > 0
        for slot, target in enumerate(dest):
            assert bytes(receiver.pool.view(target)) == bytes([slot]) * BYTES
        untouched = set(range(BLOCKS)) - set(dest)
        assert all(not receiver.pool.data[slot].any() for slot in untouched)


@BOTH
async def test_a_stale_generation_is_refused(owner: Owner, receiver: Receiver, transport: str) -> None:
    owner.do("overwrite", 2)
    with pytest.raises(PullError) as caught:
        await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, owner.refs(4), [0, 1, 2, 3])
    assert (caught.value.kind, caught.value.done) == ("stale", 2)
    fresh = [BlockRef(2, 1, owner.sum(2, 1))]
    await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, fresh, [9])
    assert bytes(receiver.pool.view(9)) == b"\x03" * BYTES


@BOTH
async def test_another_content_than_announced_is_refused(
    owner: Owner, receiver: Receiver, transport: str
) -> None:
    refs = [*owner.refs(2), BlockRef(2, 0, 1)]
    with pytest.raises(PullError) as caught:
        await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, refs, [0, 1, 2])
    assert (caught.value.kind, caught.value.done) == ("checksum", 2)


@BOTH
async def test_a_slot_beyond_the_pool_is_refused(owner: Owner, receiver: Receiver, transport: str) -> None:
    for slot, generation, kind in [(BLOCKS, 0, "stale"), (-1, 0, "mismatch"), (0, 2**64, "mismatch")]:
        with pytest.raises(PullError) as caught:
            ref = BlockRef(slot, generation, 0)
            await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, [ref], [0])
        assert caught.value.kind == kind


@BOTH
async def test_a_block_being_overwritten_never_passes(
    owner: Owner, receiver: Receiver, transport: str
) -> None:
    """The owner rewrites a slot all the time; what arrives is one generation, whole, or an error."""
    peer = KvPool.open_readonly(owner.path)
    owner.do("churn", 5, 0.001)
    passed = failed = 0
    deadline = time.monotonic() + 20
    while (passed < 5 or failed < 5) and time.monotonic() < deadline:
        generation = int(peer.generations[5])
        ref = BlockRef(5, generation, owner.sum(5, generation))
        try:
            await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, [ref], [0])
        except PullError as error:
            assert error.kind in ("stale", "checksum")
            failed += 1
        else:
            assert bytes(receiver.pool.view(0)) == bytes([(5 + generation) % 251]) * BYTES
            passed += 1
    assert passed >= 5
    assert failed >= 5
    peer.close()


async def test_a_wrong_secret_is_refused_and_the_server_goes_on(owner: Owner, receiver: Receiver) -> None:
    with pytest.raises(PullError) as caught:
        await receiver.puller.pull(owner.address("tcp"), "f" * 16, EPOCH, owner.refs(1), [0])
    assert caught.value.kind == "refused"
    assert not receiver.pool.data[0].any()
    await receiver.puller.pull(owner.address("tcp"), SECRET, EPOCH, owner.refs(1), [0])


@BOTH
async def test_another_epoch_is_a_mismatch(owner: Owner, receiver: Receiver, transport: str) -> None:
    with pytest.raises(PullError) as caught:
        await receiver.puller.pull(owner.address(transport), SECRET, EPOCH + 1, owner.refs(1), [0])
    assert caught.value.kind == "mismatch"


@BOTH
async def test_another_block_size_is_a_mismatch(owner: Owner, directory: Path, transport: str) -> None:
    other = Receiver(directory, block_bytes=4096)
    try:
        with pytest.raises(PullError) as caught:
            await other.puller.pull(owner.address(transport), SECRET, EPOCH, owner.refs(1), [0])
        assert caught.value.kind == "mismatch"
    finally:
        other.puller.close()
        other.pool.close()


async def test_a_pool_that_cannot_be_mapped_is_pulled_over_tcp(owner: Owner, receiver: Receiver) -> None:
    address = owner.address("shm", "tcp")
    assert (await receiver.puller.pull(address, SECRET, EPOCH, owner.refs(1), [0])).transport == "shm"
    elsewhere = owner.address("shm", "tcp")
    elsewhere.host = "another kernel"
    assert (await receiver.puller.pull(elsewhere, SECRET, EPOCH, owner.refs(1), [0])).transport == "tcp"
    hidden = owner.address("shm", "tcp")
    hidden.path += ".gone"
    assert (await receiver.puller.pull(hidden, SECRET, EPOCH, owner.refs(1), [0])).transport == "tcp"
    elsewhere.transports = ["shm"]
    with pytest.raises(PullError) as caught:
        await receiver.puller.pull(elsewhere, SECRET, EPOCH, owner.refs(1), [0])
    assert caught.value.kind == "unreachable"


async def test_an_owner_killed_in_the_middle_is_noticed_at_once(directory: Path) -> None:
    size, count = 1 << 20, 256
    owner = Owner(directory, block_bytes=size, blocks=2)
    receiver = Receiver(directory, block_bytes=size, blocks=count)
    try:
        refs = [owner.refs(2)[1]] * count  # block 1 holds ones: its arrival shows
        pulling = asyncio.create_task(
            receiver.puller.pull(owner.address("tcp"), SECRET, EPOCH, refs, list(range(count)))
        )
        await _until(lambda: bool(receiver.pool.data[0, 0]))
        owner.process.kill()
        began = time.monotonic()
        with pytest.raises(PullError) as caught:
            await pulling
        assert caught.value.kind == "unreachable"
        assert time.monotonic() - began < 1.0  # by the reset, not by the time-out
        assert not receiver.pool.data[count - 1].any()
    finally:
        owner.end()
        receiver.puller.close()
        receiver.pool.close()


async def test_a_stopped_owner_is_a_time_out_over_tcp_and_no_matter_over_shm(
    owner: Owner, receiver: Receiver
) -> None:
    await receiver.puller.pull(owner.address("tcp"), SECRET, EPOCH, owner.refs(1), [0])
    owner.process.send_signal(signal.SIGSTOP)
    for _ in range(2):  # on the kept connection, then on a new one
        with pytest.raises(PullError) as caught:
            await receiver.puller.pull(owner.address("tcp"), SECRET, EPOCH, owner.refs(2), [0, 1])
        assert caught.value.kind == "timeout"
    await receiver.puller.pull(owner.address("shm"), SECRET, EPOCH, owner.refs(2), [0, 1])


@BOTH
async def test_a_dead_owners_mapped_pool_is_still_what_it_was(
    owner: Owner, receiver: Receiver, transport: str
) -> None:
    await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, owner.refs(1), [0])
    owner.process.kill()
    owner.process.wait(10)
    if transport == "shm":
        await receiver.puller.pull(owner.address("shm"), SECRET, EPOCH, owner.refs(2), [0, 1])
        assert bytes(receiver.pool.view(1)) == b"\x01" * BYTES
    else:
        with pytest.raises(PullError) as caught:
            await receiver.puller.pull(owner.address("tcp"), SECRET, EPOCH, owner.refs(1), [0])
        assert caught.value.kind == "unreachable"


def test_a_reader_that_writes_past_numpy_dies_and_changes_nothing(owner: Owner) -> None:
    """The mapping is read-only in the page tables: even a stray C store cannot reach a peer's blocks."""
    code = (
        "import ctypes, sys; from baton.kvcache.pool import KvPool;"
        "pool = KvPool.open_readonly(sys.argv[1]); ctypes.memset(pool.data.ctypes.data, 9, 1)"
    )
    result = subprocess.run([sys.executable, "-c", code, owner.path], capture_output=True, timeout=30)
    assert result.returncode == -signal.SIGSEGV
    reader = KvPool.open_readonly(owner.path)
    assert ctypes.string_at(reader.data.ctypes.data, 1) == b"\0"
    reader.close()


@BOTH
async def test_two_hundred_pulls_leave_nothing_behind(
    owner: Owner, receiver: Receiver, transport: str
) -> None:
    async def pull() -> None:
        await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, owner.refs(2), [0, 1])

    await pull()
    before = _held(owner.path)
    for _ in range(200):
        await pull()
    assert _held(owner.path) == before
    receiver.puller.forget(EPOCH)
    descriptors, mappings = _held(owner.path)
    assert mappings == 0
    assert descriptors == before[0] - 1
    await pull()


async def test_pulls_at_once_share_a_bounded_number_of_connections(owner: Owner, receiver: Receiver) -> None:
    before, _ = _held(owner.path)
    pulls = [
        receiver.puller.pull(owner.address("tcp"), SECRET, EPOCH, [owner.refs(BLOCKS)[slot]], [slot])
        for slot in range(BLOCKS)
    ]
    await asyncio.gather(*pulls)
    assert _held(owner.path)[0] <= before + 4
    assert [int(value) for value in receiver.pool.data[:, 0]] == list(range(BLOCKS))


@BOTH
async def test_after_a_cancelled_pull_nothing_writes_any_more(directory: Path, transport: str) -> None:
    size, count = 1 << 20, 128
    owner = Owner(directory, block_bytes=size, blocks=2)
    receiver = Receiver(directory, block_bytes=size, blocks=count)
    try:
        refs = [owner.refs(2)[1]] * count
        pulling = asyncio.create_task(
            receiver.puller.pull(owner.address(transport), SECRET, EPOCH, refs, list(range(count)))
        )
        await _until(lambda: bool(receiver.pool.data[0, 0]))
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        receiver.pool.data[:] = 0
        await asyncio.sleep(0.1)
        assert not receiver.pool.data.any()
        stats = await receiver.puller.pull(owner.address(transport), SECRET, EPOCH, refs[:1], [3])
        assert stats.transport == transport
    finally:
        owner.end()
        receiver.puller.close()
        receiver.pool.close()


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0)


def _held(path: str) -> tuple[int, int]:
    """Open descriptors of this process, and its mappings of the file at `path`."""
    mappings = Path("/proc/self/maps").read_text().count(path)
    return len(os.listdir("/proc/self/fd")), mappings
