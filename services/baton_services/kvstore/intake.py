"""Taking offered blocks in: pulled in the background, a few at a time, into memory of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton.kvcache.hashing import block_hash
from baton.kvcache.transports import PullError, Transports
from baton.protocol.kvevents import StoredBlock, StoreOffer
from baton.telemetry.metrics import KvStoreMetrics
from baton_services.kvstore.ram import Entry, RamTier
from baton_services.kvstore.record import MAX_BLOCK_BYTES, MAX_TOKEN_BYTES

_log = logging.getLogger(__name__)

_MAX_OFFERS = 256  # waiting; past that new ones are dropped: the worker may offer the blocks again
_BATCH_BYTES = 8 * 1024 * 1024
_AVOID_S = 5.0  # how long a worker that did not answer is left alone, so that others get their turn
_SKIPPABLE = ("stale", "checksum")  # the next block may still be good


class _Staging:
    """Where the blocks of one pull land; the memory becomes the stored block, without another copy."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self.block_bytes = block_bytes
        self.buffers = [bytearray(block_bytes) for _ in range(count)]

    def view(self, slot: int) -> memoryview:
        return memoryview(self.buffers[slot])


class Intake:
    """A bounded queue of offers, and the one task that pulls them."""

    def __init__(
        self,
        transports: Transports,
        ram: RamTier,
        metrics: KvStoreMetrics,
        stored: Callable[[Entry], None],
    ) -> None:
        """Puts blocks into `ram` and calls `stored` for each."""
        self._transports = transports
        self._ram = ram
        self._metrics = metrics
        self._stored = stored
        self._offers: asyncio.Queue[StoreOffer] = asyncio.Queue(_MAX_OFFERS)
        self._closed = False
        self._avoided: dict[int, float] = {}  # epochs that did not answer, until when

    def offer(self, offer: StoreOffer) -> None:
        """Queues an offer, or drops it when too many wait."""
        bounded = 0 < offer.block_bytes <= min(MAX_BLOCK_BYTES, self._ram.capacity)
        if self._closed or not bounded or self._offers.full():
            self._metrics.dropped.labels("ram").inc(len(offer.blocks))
        else:
            self._offers.put_nowait(offer)

    def close(self) -> None:
        """Drops every later offer."""
        self._closed = True

    async def run(self) -> None:
        """Pulls what is offered, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            offer = await self._offers.get()
            if self._avoided.get(offer.epoch, 0.0) > clock():
                self._metrics.dropped.labels("ram").inc(len(offer.blocks))
                continue
            try:
                await self._take(offer)
            except PullError as error:
                _log.debug("blocks of %s were not taken in: %s", offer.worker, error)
                self._avoided = {epoch: until for epoch, until in self._avoided.items() if until > clock()}
                self._avoided[offer.epoch] = clock() + _AVOID_S

    async def _take(self, offer: StoreOffer) -> None:
        wanted = [block for block in offer.blocks if self._wants(offer, block)]
        size = max(1, _BATCH_BYTES // offer.block_bytes)
        while wanted:
            batch, wanted = wanted[:size], wanted[size:]
            try:
                wanted = await self._pull(offer, batch) + wanted
            except PullError:
                self._metrics.dropped.labels("ram").inc(len(batch) + len(wanted))
                raise

    def _wants(self, offer: StoreOffer, block: StoredBlock) -> bool:
        """Whether the block is new here, and its hash is that of its parent and tokens."""
        if (offer.fingerprint, block.hash) in self._ram:
            return False
        honest = (
            0 <= block.parent < 2**64
            and len(block.tokens) <= MAX_TOKEN_BYTES
            and block_hash(block.parent, block.tokens) == block.hash
        )
        if not honest:
            self._metrics.dropped.labels("ram").inc()
            _log.warning("%s offered a block whose tokens do not give its hash", offer.worker)
        return honest

    async def _pull(self, offer: StoreOffer, batch: list[StoredBlock]) -> list[StoredBlock]:
        """Pulls and stores a batch; returns what is left of it after a block that is gone."""
        staging = _Staging(offer.block_bytes, len(batch))
        done, left = len(batch), []
        refs = [block.ref for block in batch]
        slots = range(len(batch))
        try:
            await self._transports.pull(staging, offer.address, offer.secret, offer.epoch, refs, slots)
        except PullError as error:
            if error.kind not in _SKIPPABLE:
                raise
            done, left = error.done, batch[error.done + 1 :]
            self._metrics.dropped.labels("ram").inc()
        now = asyncio.get_running_loop().time()
        for block, data in zip(batch[:done], staging.buffers, strict=False):
            key = (offer.fingerprint, block.hash)
            entry = Entry(key, block.parent, block.tokens, block.ref.checksum, data)
            if self._ram.add(entry, now):
                self._metrics.stored.labels("ram").inc()
                self._stored(entry)
            elif key not in self._ram:
                self._metrics.dropped.labels("ram").inc()
        return left
