"""The KV store: takes blocks that workers may soon evict, gives them back on a prefix hit.

    worker -> StoreOffer    we pull those blocks, in the background: RAM, then Redis behind it
    worker -> StoreLookup   answered with the leading blocks held; the worker pulls them from our block server

Everything here is a cache. Whatever goes wrong is a miss.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.bus.address import own_address
from baton.bus.inbox import Delivery, Inbox
from baton.config.tls import TlsError
from baton.kvcache.transports import BlockServer, PeerTls, Transports
from baton.protocol.base import unpack_hashes
from baton.protocol.handoff import Address
from baton.protocol.kvevents import StoreFound, StoreLookup, StoreOffer
from baton.protocol.liveness import Heartbeat, State
from baton.protocol.request import Accepted
from baton.protocol.work import Drain
from baton.service import ServiceHost, StartupError
from baton.telemetry.metrics import KvStoreMetrics
from baton_services.kvstore.intake import Intake
from baton_services.kvstore.ram import Entry, Key, RamTier

if TYPE_CHECKING:
    from baton_services.kvstore.redis_tier import RedisTier

_log = logging.getLogger(__name__)

LEASE_MS = 5_000
MAX_LOOKUP = 1_024  # blocks
MAX_BUDGET_MS = 200
MB = 1024 * 1024
REDIS_BUFFER_MB = 64  # RAM through which blocks pass when the RAM tier is off but Redis is on
_REDIS_BATCH = 16  # blocks read from Redis at once
_SLOW_LOOKUPS = 64  # lookups that may wait for Redis at once; more get what is in RAM


class KvStore:
    """One KV store process."""

    def __init__(self, host: ServiceHost) -> None:
        settings = host.settings.kvstore
        ram_mb = settings.ram_mb or (REDIS_BUFFER_MB if settings.redis_url else 0)
        self._host = host
        self._metrics = KvStoreMetrics(host.registry)
        self._ram = RamTier(ram_mb * MB)
        self._redis: RedisTier | None = None
        self._secret = secrets.token_hex(16)
        worker = host.settings.worker
        try:
            tls = PeerTls.of(worker.tls_ca, worker.tls_cert, worker.tls_key)
        except TlsError as error:
            raise StartupError(str(error)) from error
        self._server = BlockServer(self._ram, secret=self._secret, epoch=host.epoch, tls=tls)
        self._transports = Transports(shm_dir=worker.shm_dir, tls=tls)
        self._intake = Intake(self._transports, self._ram, self._metrics, self._stored)
        self._address = Address(host="", transports=["tcp"])
        self._slow = 0
        self._reading: dict[Key, asyncio.Task[None]] = {}

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Listens for offers and lookups.

        Raises:
            StartupError: the Redis URL is none, or the address cannot be bound.
        """
        settings = self._host.settings.kvstore
        try:
            if settings.redis_url:
                from baton_services.kvstore.redis_tier import RedisTier  # 21 MB, for those who use it

                self._redis = RedisTier(
                    settings.redis_url,
                    capacity=settings.redis_mb * MB,
                    ttl_s=settings.redis_ttl_s,
                    metrics=self._metrics,
                    ca=settings.redis_ca,
                )
            bound = await asyncio.to_thread(own_address, settings.tcp_host, self._host.settings.bus.url)
            port = await self._server.start(bound, settings.tcp_port)
        except ValueError as error:
            raise StartupError(str(error)) from error
        except OSError as error:
            raise StartupError(f"{error}; see kvstore.tcp_host") from error
        self._address = Address(host="", tcp_host=bound, tcp_port=port, transports=["tcp"])
        inbox = await self._host.bus.inbox(self._host.subject, StoreOffer, StoreLookup, Drain)
        self._host.directory.subscribe(self._peer_changed)
        group.create_task(self._listen(inbox, group))
        group.create_task(self._intake.run())
        if self._redis is not None:
            group.create_task(self._redis.run())
        self._host.beat.state = State.READY
        await self._host.announce()

    async def drain(self, grace_s: float) -> None:
        """Takes no more offers, and writes what Redis is still to get."""
        self._intake.close()
        if self._redis is not None:
            await self._redis.flush(min(grace_s, 5.0))

    async def stop(self) -> None:
        """Closes the block server, the transports and Redis."""
        await self._server.stop()
        self._transports.close()
        if self._redis is not None:
            await self._redis.close()

    async def _listen(self, inbox: Inbox, group: asyncio.TaskGroup) -> None:
        async for delivery in inbox:
            match delivery.message:
                case StoreOffer() as offer:
                    self._intake.offer(offer)
                case StoreLookup() as lookup:
                    await self._look_up(delivery, lookup, group)
                case Drain() as drain:
                    await delivery.respond(Accepted())
                    self._host.request_drain(drain.grace_ms)

    # lookups

    async def _look_up(self, delivery: Delivery, lookup: StoreLookup, group: asyncio.TaskGroup) -> None:
        """Answers from RAM at once; what RAM lacks may be waited for, beside other lookups."""
        hashes = unpack_hashes(lookup.hashes[: min(len(lookup.hashes) // 8, MAX_LOOKUP) * 8])
        keys = [(lookup.fingerprint, int(value)) for value in hashes]
        here = sum(1 for _ in self._leading(keys))
        if here == len(keys) or self._redis is None or self._slow >= _SLOW_LOOKUPS:
            await self._answer(delivery, keys, here)
            return
        self._slow += 1
        group.create_task(self._look_deeper(self._redis, delivery, keys, here, lookup.budget_ms, group))

    async def _look_deeper(
        self,
        redis: RedisTier,
        delivery: Delivery,
        keys: list[Key],
        here: int,
        budget_ms: int,
        group: asyncio.TaskGroup,
    ) -> None:
        """Reads on in Redis while the budget lasts. What comes later is in RAM for the next lookup."""
        deadline = asyncio.get_running_loop().time() + min(max(budget_ms, 0), MAX_BUDGET_MS) / 1000
        in_ram = here
        try:
            while here < len(keys):
                batch = keys[here : here + _REDIS_BATCH]
                task = self._reading.get(batch[0])
                if task is None:
                    task = group.create_task(self._read(redis, batch))
                    self._reading[batch[0]] = task
                left = deadline - asyncio.get_running_loop().time()
                await asyncio.wait({task}, timeout=max(left, 0))
                before, here = here, sum(1 for _ in self._leading(keys))
                if here == before or not task.done():
                    break
        finally:
            self._slow -= 1
        await self._answer(delivery, keys, in_ram)

    async def _read(self, redis: RedisTier, batch: list[Key]) -> None:
        try:
            now = asyncio.get_running_loop().time()
            for entry in await redis.read(batch):
                self._metrics.hits.labels("redis").inc()
                if self._ram.add(entry, now):
                    self._ram.pin(entry, now + LEASE_MS / 1000)
            self._show()
        finally:
            del self._reading[batch[0]]

    async def _answer(self, delivery: Delivery, keys: list[Key], in_ram: int) -> None:
        until = asyncio.get_running_loop().time() + LEASE_MS / 1000
        entries = list(self._leading(keys))
        for entry in reversed(entries):  # a chain is of no use without its head, so its tail goes first
            self._ram.pin(entry, until)
        blocks = [entry.described() for entry in entries]
        self._metrics.hits.labels("ram").inc(min(in_ram, len(blocks)))
        self._metrics.misses.inc(len(keys) - len(blocks))
        found = StoreFound(
            blocks=blocks,
            epoch=self._host.epoch,
            address=self._address,
            secret=self._secret,
            lease_ms=LEASE_MS,
        )
        await delivery.respond(found if blocks else StoreFound())

    def _leading(self, keys: list[Key]) -> Iterator[Entry]:
        """The blocks in RAM from the first key on, each the child of the one before."""
        parent: int | None = None
        for key in keys:
            entry = self._ram.find(key)
            if entry is None or (parent is not None and entry.parent != parent):
                return
            parent = key[1]
            yield entry

    # what comes in

    def _stored(self, entry: Entry) -> None:
        if self._redis is not None:
            self._redis.offer(entry)
        self._show()

    def _show(self) -> None:
        self._metrics.blocks.labels("ram").set(len(self._ram))
        self._metrics.bytes.labels("ram").set(self._ram.bytes)
        evicted, self._ram.evicted = self._ram.evicted, 0
        self._metrics.evicted.labels("ram").inc(evicted)

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if kind == "left":
            self._transports.forget(beat.epoch)
