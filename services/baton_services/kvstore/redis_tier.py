"""The Redis tier: written behind, read on a miss, and never a cause of an error.

    baton:kv:<fingerprint>:<hash>   a block (`record`), for `redis_ttl_s` since its last use
    baton:kv:used                   sorted set: `<fingerprint>:<hash>:<bytes>` by Unix time of last use
    baton:kv:bytes                  the sum of those bytes: shared by all stores, so that they keep one bound

A crash between two commands can leave the sum a few blocks off; the bound is approximate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.telemetry.metrics import KvStoreMetrics
from baton_services.kvstore import record
from baton_services.kvstore.breaker import Breaker
from baton_services.kvstore.ram import Entry, Key

_log = logging.getLogger(__name__)

PREFIX = "baton:kv:"
USED = "baton:kv:used"
BYTES = "baton:kv:bytes"

WRITE_S = 1.0
READ_S = 0.5
_QUEUE_BYTES = 32 * 1024 * 1024
_EVICT_AT_ONCE = 16
_CONNECTIONS = 8

Failures = (RedisError, OSError, TimeoutError)


class RedisTier:
    """Blocks in Redis, shared by the stores of all hosts."""

    def __init__(self, url: str, *, capacity: int, ttl_s: int, metrics: KvStoreMetrics, ca: str = "") -> None:
        """Connects at the first use.

        Args:
            ca: for rediss://, the CA that the server's certificate is checked against; empty: the system's.

        Raises:
            ValueError: `url` is not a Redis URL. The text does not hold it: it may hold a password.
        """
        tls = {"ssl_ca_certs": ca} if ca and url.startswith("rediss://") else {}
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=READ_S,
                socket_connect_timeout=READ_S,
                retry=Retry(NoBackoff(), 0),
                **tls,
            )
        except ValueError as error:
            raise ValueError("kvstore.redis_url is not redis://[:password@]host:port/db") from error
        self._redis = redis.asyncio.Redis(connection_pool=pool)
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._reads, self._writes = Breaker(), Breaker()
        self._queue: deque[Entry] = deque()
        self._queue_bytes = 0
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._used: set[str] = set()

    # writing

    def offer(self, entry: Entry) -> None:
        """Queues a block to be written; when the queue is full or Redis is off, it is dropped."""
        full = self._queue_bytes + entry.size > _QUEUE_BYTES
        if full or not self._writes.allows(time.monotonic()):
            self._metrics.dropped.labels("redis").inc()
            return
        self._queue.append(entry)
        self._queue_bytes += entry.size
        self._written.clear()
        self._wake.set()

    async def run(self) -> None:
        """Writes what is queued, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._touch()
            while self._queue:
                entry = self._queue.popleft()
                self._queue_bytes -= entry.size
                await self._write(entry)
            self._written.set()

    async def flush(self, timeout_s: float) -> None:
        """Waits until the queue is written, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._written.wait()
        except TimeoutError:
            _log.warning("%d blocks were not written to Redis in time", len(self._queue))

    async def _write(self, entry: Entry) -> None:
        if not self._writes.allows(time.monotonic()):
            self._metrics.dropped.labels("redis").inc()
            return
        value = record.pack(entry)
        try:
            async with asyncio.timeout(WRITE_S):
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.set(_name(entry.key), value, ex=self._ttl_s)
                    pipe.zadd(USED, {_member(entry.key, len(value)): time.time()})
                    pipe.zcard(USED)
                    _, added, count = await pipe.execute()
                self._metrics.blocks.labels("redis").set(count)
                if added:
                    self._metrics.stored.labels("redis").inc()
                    await self._keep_bound(await self._redis.incrby(BYTES, len(value)))
        except Failures as error:
            self._failed(self._writes, "written", error)
            self._metrics.dropped.labels("redis").inc()
        else:
            self._writes.succeeded()

    async def _keep_bound(self, held: int) -> None:
        """Removes the least recently used blocks while Redis holds more than its bound."""
        self._metrics.bytes.labels("redis").set(max(0, held))
        while held > self._capacity:
            oldest: Any = await self._redis.zpopmin(USED, _EVICT_AT_ONCE)
            if not oldest:
                await self._redis.set(BYTES, 0)
                return
            names, freed = [], 0
            for member, _ in oldest:
                name, _, size = member.rpartition(b":")
                names.append(PREFIX.encode() + name)
                freed += int(size) if size.isdigit() else 0
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.unlink(*names)
                pipe.decrby(BYTES, freed)
                _, held = await pipe.execute()
            self._metrics.evicted.labels("redis").inc(len(names))

    async def _touch(self) -> None:
        """Notes the use of blocks that were read."""
        used, self._used = self._used, set()
        if not used or not self._writes.allows(time.monotonic()):
            return
        try:
            async with asyncio.timeout(WRITE_S), self._redis.pipeline(transaction=False) as pipe:
                for member in used:
                    pipe.zadd(USED, {member: time.time()}, xx=True)
                    pipe.expire(PREFIX + member.rpartition(":")[0], self._ttl_s)
                await pipe.execute()
        except Failures as error:
            self._failed(self._writes, "touched", error)

    # reading

    async def read(self, keys: Sequence[Key]) -> list[Entry]:
        """The leading blocks of `keys` that Redis holds, verified. Any trouble is a miss."""
        if not keys or not self._reads.allows(time.monotonic()):
            return []
        try:
            async with asyncio.timeout(READ_S):
                values = await self._get([_name(key) for key in keys])
        except Failures as error:
            self._failed(self._reads, "read", error)
            return []
        self._reads.succeeded()
        found = []
        for key, value in zip(keys, values, strict=True):
            entry = self._believe(key, value)
            if entry is None:
                break
            found.append(entry)
            self._used.add(_member(key, len(value or b"")))
        if self._used:
            self._wake.set()
        return found

    async def _get(self, names: list[str]) -> list[bytes | None]:
        """Values up to the first that is absent, oversized or not a string; None for the rest."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.strlen(name)
            sizes = await _results(pipe)
        wanted = 0
        for size in sizes:
            if not isinstance(size, int) or not 0 < size <= record.MAX_VALUE:
                if size != 0:
                    self._metrics.errors.labels("redis").inc()
                break
            wanted += 1
        if not wanted:
            return [None] * len(names)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names[:wanted]:
                pipe.get(name)
            values = await _results(pipe)
        return [value if isinstance(value, bytes) else None for value in values] + [None] * (
            len(names) - wanted
        )

    def _believe(self, key: Key, value: bytes | None) -> Entry | None:
        if value is None:
            return None
        try:
            return record.unpack(value, key)
        except record.BadRecord as error:
            self._metrics.errors.labels("redis").inc()
            _log.warning("a value in Redis is not the block of its key: %s", error)
            return None

    def _failed(self, breaker: Breaker, what: str, error: BaseException) -> None:
        self._metrics.errors.labels("redis").inc()
        words = str(error) or type(error).__name__
        if breaker.failed(time.monotonic()):
            _log.warning("Redis is left alone for a while; a block could not be %s: %s", what, words)
        else:
            _log.debug("a block could not be %s: %s", what, words)

    async def close(self) -> None:
        """Closes the connections."""
        try:
            async with asyncio.timeout(WRITE_S):
                await self._redis.aclose()
        except Failures as error:
            _log.debug("closing Redis: %s", error)


def _name(key: Key) -> str:
    return f"{PREFIX}{key[0]}:{key[1]:016x}"


def _member(key: Key, size: int) -> str:
    return f"{key[0]}:{key[1]:016x}:{size}"


async def _results(pipe: Pipeline) -> list[object]:
    results: list[object] = await pipe.execute(raise_on_error=False)
    return results
