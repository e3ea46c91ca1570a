"""The KV store as a real process, with a real NATS server and a real Redis: same bytes back, or a miss."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import redis.asyncio

from baton.bus.connection import Bus
from baton.bus.directory import Directory
from baton.config.settings import BusSettings, KvStoreSettings, MetricsSettings, Settings, WorkerSettings
from baton.kvcache.hashing import chain, root_hash
from baton.kvcache.pool import KvPool, checksum
from baton.kvcache.store_client import StoreClient
from baton.kvcache.transports import BlockServer, Puller, host_id
from baton.protocol import subjects
from baton.protocol.base import BlockHashes, TokenIds, pack_hashes, pack_tokens
from baton.protocol.codec import Codec
from baton.protocol.handoff import Address, BlockRef
from baton.protocol.kvevents import StoredBlock, StoreFound, StoreLookup
from baton.protocol.liveness import Geometry, Heartbeat, Role
from baton.protocol.stats import Snapshot

Connect = Callable[[str], Awaitable[Bus]]

BYTES = 32_768
SIZE = 16
FINGERPRINT = "f" * 32
SECRET = "worker's own secret"
PASSWORD = "very-secret-redis-password"
SERVE = """
import sys, msgspec
from baton.config.settings import Settings
from baton_services.kvstore.main import serve
sys.exit(serve(msgspec.json.decode(sys.stdin.buffer.read(), type=Settings), sys.argv[1]))
"""


class Store:
    """A KV store process."""

    def __init__(self, bus: BusSettings, directory: Path, name: str, **options: object) -> None:
        settings = Settings(
            bus=bus,
            worker=WorkerSettings(shm_dir=str(directory)),
            kvstore=msgspec.convert(options, KvStoreSettings),
            metrics=MetricsSettings(interval_ms=100),
        )
        self.name = name
        self.log = directory / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if key != "BATON_SUPERVISED"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, name],
                stdin=subprocess.PIPE,
                stderr=log,
                stdout=log,
                env=environment,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(settings))
        self.process.stdin.close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Redis:
    """A redis-server of our own, with a password, in a directory of its own."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--requirepass", PASSWORD, "--dir", str(directory), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = redis.asyncio.Redis.from_url(self.url)

    async def ready(self) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    await self.client.ping()
                    return
                except redis.exceptions.ConnectionError:
                    await asyncio.sleep(0.02)

    async def value(self, name: str) -> bytes:
        value = await self.client.get(name)
        assert isinstance(value, bytes), name
        return value

    async def blocks(self) -> list[bytes]:
        return [key async for key in self.client.scan_iter(f"baton:kv:{FINGERPRINT}:*")]

    async def end(self) -> None:
        await self.client.aclose()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)


class Worker:
    """What a worker has: a pool, a block server, and its client of the store."""

    def __init__(self, bus: Bus, directory: Path, name: str, epoch: int) -> None:
        geometry = Geometry(block_size=SIZE, block_bytes=BYTES)
        self.bus = bus
        self.name, self.epoch, self.shm = name, epoch, directory
        self.pool = KvPool.create(directory, name, geometry, 128, epoch=epoch)
        self.puller = Puller(self.pool, shm_dir=directory)
        self.server = BlockServer(self.pool, secret=SECRET, epoch=epoch)
        self.directory = Directory(bus, model="m")
        self.following = asyncio.create_task(self.directory.run())
        self.transports = ["shm", "tcp"]
        self.client: StoreClient

    async def start(self, store: Store | None) -> None:
        port = await self.server.start("127.0.0.1")
        address = Address(
            host=host_id(self.shm),
            path=self.pool.path,
            tcp_host="127.0.0.1",
            tcp_port=port,
            transports=self.transports,
        )
        only = self.directory if store is None else _Only(self.directory, store.name)
        self.client = StoreClient(
            self.bus,
            only,
            self.puller,
            worker=self.name,
            epoch=self.epoch,
            fingerprint=FINGERPRINT,
            block_bytes=BYTES,
            address=address,
            secret=SECRET,
        )
        async with asyncio.timeout(20):
            while not self.client.available():
                await asyncio.sleep(0.02)

    def fill(self, chained: Chain, slots: list[int]) -> list[StoredBlock]:
        """Writes a chain's blocks into slots, as a prefill does."""
        blocks = []
        for index, slot in enumerate(slots):
            self.pool.generations[slot] += 1
            self.pool.data[slot] = chained.content(index)
            ref = BlockRef(slot, int(self.pool.generations[slot]), checksum(self.pool.view(slot)))
            blocks.append(chained.block(index, ref))
        return blocks

    def evict(self, slots: list[int]) -> None:
        self.pool.generations[slots] += 1
        self.pool.data[slots] = 0xEE

    async def found(self, chained: Chain, count: int, *, within_s: float = 10) -> StoreFound:
        """Looks a chain up until `count` blocks of it are found."""
        async with asyncio.timeout(within_s):
            while True:
                found = await self.look_up(chained)
                if found is not None and len(found.blocks) >= count:
                    return found
                await asyncio.sleep(0.02)

    async def look_up(self, chained: Chain, *, budget_s: float = 0.3) -> StoreFound | None:
        return await self.client.lookup(chained.hashes, chained.tokens, chained.root, budget_s=budget_s)

    def holds(self, chained: Chain, slots: list[int]) -> bool:
        return all((self.pool.data[slot] == chained.content(i)).all() for i, slot in enumerate(slots))

    async def end(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        await self.server.stop()
        self.puller.close()
        self.pool.close()


class _Only(Directory):
    """A view of the cluster in which there is one store."""

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory, self._name = directory, name

    def live(self, role: Role, *, ready: bool = True) -> list[Heartbeat]:
        return [beat for beat in self._directory.live(role, ready=ready) if beat.id == self._name]


class Chain:
    """The blocks of one prompt."""

    def __init__(self, seed: int, count: int) -> None:
        random = np.random.default_rng(seed)
        self.tokens: TokenIds = random.integers(0, 50_000, count * SIZE).astype(np.uint32)
        self.root = root_hash(FINGERPRINT)
        self.hashes: BlockHashes = chain(self.root, self.tokens, SIZE)
        self._content = random.integers(0, 256, (count, BYTES), dtype=np.uint8)

    def content(self, index: int) -> npt.NDArray[np.uint8]:
        return self._content[index]

    def block(self, index: int, ref: BlockRef) -> StoredBlock:
        parent = int(self.hashes[index - 1]) if index else self.root
        tokens = pack_tokens(self.tokens[index * SIZE : (index + 1) * SIZE])
        return StoredBlock(int(self.hashes[index]), parent, tokens, ref)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-test-", dir="/dev/shm") as name:
        yield Path(name)


StartStore = Callable[..., Store]
StartWorker = Callable[..., Awaitable[Worker]]
StartRedis = Callable[..., Awaitable[Redis]]


@pytest.fixture
def start_store(nats_server: BusSettings, directory: Path) -> Iterator[StartStore]:
    stores: list[Store] = []

    def start(**options: object) -> Store:
        stores.append(Store(nats_server, directory, f"store-{os.getpid()}-{time.time_ns()}", **options))
        return stores[-1]

    yield start
    for store in stores:
        store.end()


@pytest.fixture(scope="module")
def shared(nats_server: BusSettings) -> Iterator[Store]:
    """A store for the tests that leave it as it was, but for what it holds: take chains of your own."""
    with tempfile.TemporaryDirectory(prefix="baton-test-", dir="/dev/shm") as name:
        store = Store(nats_server, Path(name), f"store-{os.getpid()}-shared", ram_mb=16)
        yield store
        store.end()


@pytest.fixture
async def start_worker(connect: Connect, directory: Path) -> AsyncIterator[StartWorker]:
    workers: list[Worker] = []

    async def start(store: Store, **attributes: object) -> Worker:
        worker = Worker(await connect("worker"), directory, f"w{len(workers)}", 1_000 + len(workers))
        for name, value in attributes.items():
            setattr(worker, name, value)
        workers.append(worker)
        await worker.start(store)
        return worker

    yield start
    for worker in workers:
        await worker.end()


@pytest.fixture
async def start_redis(directory: Path) -> AsyncIterator[StartRedis]:
    servers: list[Redis] = []

    async def start(*arguments: str) -> Redis:
        servers.append(Redis(directory, *arguments))
        await servers[-1].ready()
        return servers[-1]

    yield start
    for server in servers:
        await server.end()


async def figures(bus: Bus, store: Store) -> dict[str, float]:
    """The store's own metrics, by name and tier."""
    inbox = await bus.inbox(subjects.stats(store.name), Snapshot)
    async with asyncio.timeout(10):
        await inbox.get()  # may have been on its way already
        snapshot = (await inbox.get()).message
    inbox.close()
    return {
        f"{family.name}:{sample.labels.get('tier', '')}": sample.value
        for family in snapshot.families
        for sample in family.samples
        if family.name.startswith("baton_kvstore") and sample.suffix in ("", "_total")
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_evicted_blocks_come_back_bit_for_bit(
    shared: Store, start_worker: StartWorker, transport: str
) -> None:
    worker = await start_worker(shared, transports=[transport])
    before = await figures(worker.bus, shared)
    seed = 100 if transport == "shm" else 101
    chained = Chain(seed, 20)
    assert await worker.client.offer(worker.fill(chained, list(range(20)))) == 20
    await worker.found(chained, 20)
    worker.evict(list(range(20)))

    found = await worker.found(chained, 20)
    assert found.lease_ms > 0
    dest = list(range(40, 60))
    assert await worker.client.fetch(found, dest) == 20
    assert worker.holds(chained, dest)

    longer = Chain(seed, 20)
    longer.hashes[3:] += np.uint64(1)  # the chain branches off after three blocks
    branch = await worker.look_up(longer)
    assert branch is not None
    assert len(branch.blocks) == 3
    assert await worker.look_up(Chain(102, 5)) is None
    after = await figures(worker.bus, shared)
    seen = {name: after[name] - before.get(name, 0) for name in after}
    assert seen["baton_kvstore_stored:ram"] == seen["baton_kvstore_blocks:ram"] == 20
    assert seen["baton_kvstore_bytes:ram"] >= 20 * BYTES
    assert seen["baton_kvstore_hits:ram"] >= 43
    assert seen["baton_kvstore_misses:"] >= 17 + 5
    assert psutil.Process(shared.process.pid).memory_info().rss < 120e6


async def test_ram_is_bounded_and_the_least_recently_used_goes(
    start_store: StartStore, start_worker: StartWorker
) -> None:
    store = start_store(ram_mb=1)  # 31 blocks
    worker = await start_worker(store)
    old, used, new = Chain(1, 10), Chain(2, 10), Chain(3, 20)
    for first, chained, count in ((0, old, 10), (10, used, 10)):
        await worker.client.offer(worker.fill(chained, list(range(first, first + count))))
        await _stored(worker, store, first + count)
    await worker.found(used, 10)
    await worker.client.offer(worker.fill(new, list(range(20, 40))))
    await worker.found(new, 20)
    assert await worker.look_up(old) is None  # its first block went first
    still = await worker.look_up(used)
    assert still is not None
    assert len(still.blocks) == 10
    seen = await figures(worker.bus, store)
    assert seen["baton_kvstore_bytes:ram"] <= 1 << 20
    assert seen["baton_kvstore_evicted:ram"] >= 9


async def test_a_block_overwritten_before_the_pull_is_never_stored(
    shared: Store, start_worker: StartWorker
) -> None:
    worker = await start_worker(shared)
    before = await figures(worker.bus, shared)
    chained = Chain(110, 6)
    blocks = worker.fill(chained, list(range(6)))
    worker.evict([2])  # released since, and another request writes there
    worker.pool.data[4] += 1  # written without a new generation: only the checksum can tell
    await worker.client.offer(blocks)
    await _stored(worker, shared, int(before.get("baton_kvstore_stored:ram", 0)) + 4)
    found = await worker.found(chained, 2)
    assert len(found.blocks) == 2
    after = await figures(worker.bus, shared)
    assert after["baton_kvstore_dropped:ram"] == before.get("baton_kvstore_dropped:ram", 0) + 2


async def test_a_block_whose_tokens_do_not_give_its_hash_is_not_taken(
    shared: Store, start_worker: StartWorker
) -> None:
    worker = await start_worker(shared)
    chained, other = Chain(120, 2), Chain(121, 2)
    blocks = worker.fill(chained, [0, 1])
    forged = other.block(0, blocks[0].ref)
    forged.tokens = blocks[0].tokens
    await worker.client.offer([forged, blocks[0], blocks[1]])
    await worker.found(chained, 2)
    assert await worker.look_up(other) is None


async def test_a_worker_compares_tokens_itself(shared: Store, start_worker: StartWorker) -> None:
    worker = await start_worker(shared)
    chained = Chain(130, 4)
    await worker.client.offer(worker.fill(chained, list(range(4))))
    await worker.found(chained, 4)
    collides = Chain(130, 4)
    collides.tokens = chained.tokens.copy()
    collides.tokens[SIZE] += 1  # as if another prompt had the same hashes
    found = await worker.look_up(collides)
    assert found is not None
    assert len(found.blocks) == 1


async def test_without_a_store_nothing_is_found(start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(ram_mb=16)
    worker = await start_worker(store)
    chained = Chain(1, 4)
    await worker.client.offer(worker.fill(chained, list(range(4))))
    found = await worker.found(chained, 4)
    store.process.kill()
    store.process.wait(10)
    assert await worker.client.fetch(found, [10, 11, 12, 13]) == 0
    began = time.monotonic()
    assert await worker.look_up(chained, budget_s=5) is None
    assert time.monotonic() - began < 2
    assert not worker.client.available()  # left alone for a while
    assert await worker.client.offer(worker.fill(chained, [0])) == 0


async def test_a_malformed_lookup_changes_nothing(shared: Store, start_worker: StartWorker) -> None:
    worker = await start_worker(shared)
    [beat] = [beat for beat in worker.directory.live(Role.KVSTORE) if beat.id == shared.name]
    for hashes in (b"", b"123", pack_hashes(range(3_000))):
        lookup = StoreLookup(fingerprint="x", hashes=hashes)
        answer = await worker.bus.call(beat.subject, lookup, Codec(StoreFound), timeout_s=2)
        assert answer.blocks == []


async def test_redis_is_shared_by_two_stores_and_survives_them(
    start_store: StartStore, start_worker: StartWorker, start_redis: StartRedis
) -> None:
    server = await start_redis()
    one = start_store(ram_mb=16, redis_url=server.url)
    worker = await start_worker(one)
    chained = Chain(1, 24)
    await worker.client.offer(worker.fill(chained, list(range(24))))
    await _until(lambda: _count(server, 24))
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(20) == 0

    two = start_store(ram_mb=0, redis_url=server.url)  # no RAM tier of its own, only a buffer
    other = await start_worker(two)
    found = await other.found(chained, 24)
    dest = list(range(100, 124))
    assert await other.client.fetch(found, dest) == 24
    assert other.holds(chained, dest)
    assert (await figures(other.bus, two))["baton_kvstore_hits:redis"] == 24
    ttl = await server.client.ttl((await server.blocks())[0])
    assert 3_000 < ttl <= 3_600
    for store in (one, two):
        assert PASSWORD not in store.log.read_text()


async def test_redis_keeps_within_its_bound(
    start_store: StartStore, start_worker: StartWorker, start_redis: StartRedis
) -> None:
    server = await start_redis()
    store = start_store(ram_mb=16, redis_url=server.url, redis_mb=1)
    worker = await start_worker(store)
    chained = Chain(1, 100)
    await worker.client.offer(worker.fill(chained, list(range(100))))

    async def last_written() -> bool:
        return bool(await server.client.exists(f"baton:kv:{FINGERPRINT}:{int(chained.hashes[99]):016x}"))

    await _until(last_written)

    async def counted_right() -> bool:
        blocks = await server.blocks()
        held = sum([await server.client.strlen(block) for block in blocks])
        assert len(blocks) < 34  # one being written, one being counted
        return 10 < len(blocks) < 32 and held == int(await server.value("baton:kv:bytes"))

    await _until(counted_right)


async def test_values_in_redis_that_are_not_the_block_are_misses(
    start_store: StartStore, start_worker: StartWorker, start_redis: StartRedis
) -> None:
    poisons: list[Callable[[bytes, bytes], bytes | None]] = [
        lambda good, next: good[:-1] + bytes([good[-1] ^ 1]),
        lambda good, next: good[:-1],
        lambda good, next: good + b"x",
        lambda good, next: next,
        lambda good, next: b"",
        lambda good, next: b"BKV1\xff\xff\xff\xff",
        lambda good, next: b"BKV1\x01\x00\x00\x00\xc1",
        lambda good, next: None,  # a list, not a string
    ]
    server = await start_redis()
    one = start_store(ram_mb=16, redis_url=server.url)
    worker = await start_worker(one)
    chains = [Chain(seed, 4) for seed in range(len(poisons))]
    for chained in chains:
        await worker.client.offer(worker.fill(chained, list(range(4))))
        await worker.found(chained, 4)  # pulled, so the slots may be written again
    await _until(lambda: _count(server, 4 * len(poisons)))
    for chained, poison in zip(chains, poisons, strict=True):
        names = [f"baton:kv:{FINGERPRINT}:{int(value):016x}" for value in chained.hashes]
        value = poison(await server.value(names[2]), await server.value(names[3]))
        await server.client.delete(names[2])
        if value is None:
            await server.client.rpush(names[2], "element")
        else:
            await server.client.set(names[2], value)

    two = start_store(ram_mb=16, redis_url=server.url)
    other = await start_worker(two)
    for number, chained in enumerate(chains):
        found = await other.found(chained, 2)
        again = await other.look_up(chained)
        assert again is not None
        assert (len(found.blocks), len(again.blocks)) == (2, 2), number
        assert await other.client.fetch(again, [60, 61]) == 2
        assert other.holds(chained, [60, 61])
    assert (await figures(other.bus, two))["baton_kvstore_errors:redis"] >= len(poisons) - 1


@pytest.mark.parametrize("trouble", ["killed", "stopped", "full", "wrong password"])
async def test_redis_in_trouble_means_misses_and_quick_answers(
    start_store: StartStore, start_worker: StartWorker, start_redis: StartRedis, trouble: str
) -> None:
    server = await start_redis(
        *(["--maxmemory", "1mb", "--maxmemory-policy", "noeviction"] * (trouble == "full"))
    )
    url = server.url.replace(PASSWORD, PASSWORD + "x") if trouble == "wrong password" else server.url
    store = start_store(ram_mb=16, redis_url=url)
    worker = await start_worker(store)
    if trouble == "killed":
        server.process.kill()
        server.process.wait(10)
    elif trouble == "stopped":
        server.process.send_signal(signal.SIGSTOP)
    chained = Chain(1, 60)
    await worker.client.offer(worker.fill(chained, list(range(60))))
    await worker.found(chained, 60)  # RAM serves all the same
    took = []
    for seed in range(10, 30):
        began = time.monotonic()
        assert await worker.look_up(Chain(seed, 4), budget_s=3) is None
        took.append(time.monotonic() - began)
    assert max(took) < 2  # answered by the store, not given up by the client
    assert worker.client.available()
    found = await worker.found(chained, 60)
    assert await worker.client.fetch(found, list(range(60, 120))) == 60
    assert worker.holds(chained, list(range(60, 120)))
    assert store.process.poll() is None
    assert (await figures(worker.bus, store))["baton_kvstore_errors:redis"] >= 1
    assert PASSWORD not in store.log.read_text()


async def test_redis_is_used_again_once_it_is_back(
    start_store: StartStore, start_worker: StartWorker, start_redis: StartRedis
) -> None:
    server = await start_redis()
    server.process.send_signal(signal.SIGSTOP)
    store = start_store(ram_mb=16, redis_url=server.url)
    worker = await start_worker(store)
    for seed in range(4):
        await worker.look_up(Chain(seed, 2))
    server.process.send_signal(signal.SIGCONT)
    chained = Chain(9, 4)

    async def written() -> bool:
        await worker.client.offer(worker.fill(Chain(int(time.monotonic() * 1e6), 1), [0]))
        return bool(await server.blocks())

    await _until(written)
    await worker.client.offer(worker.fill(chained, [1, 2, 3, 4]))
    await worker.found(chained, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"redis_url": "http://u:hunter2@h"}, "kvstore.redis_url"), ({"tcp_host": "203.0.113.1"}, "tcp_host")],
)
def test_settings_it_cannot_use_are_one_clear_line(
    start_store: StartStore, options: dict[str, str], words: str
) -> None:
    store = start_store(**options)
    assert store.process.wait(20) == 1
    text = store.log.read_text()
    assert words in text
    assert "Traceback" not in text
    assert "hunter2" not in text


async def _stored(worker: Worker, store: Store, count: int) -> None:
    async with asyncio.timeout(10):
        while (await figures(worker.bus, store)).get("baton_kvstore_stored:ram", 0) < count:
            pass


async def _count(server: Redis, count: int) -> bool:
    return len(await server.blocks()) == count


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while not await true():
            await asyncio.sleep(0.05)
