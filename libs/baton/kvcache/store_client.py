"""What a worker uses of the KV store: offer blocks, look a chain up, fetch what was found.

The store is a cache of last resort: when it is absent, slow or wrong, everything here says "nothing found".
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.kvcache.transports import Puller, PullError
from baton.protocol.base import BlockHashes, TokenIds, pack_hashes, pack_tokens
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.handoff import Address
from baton.protocol.kvevents import StoredBlock, StoreFound, StoreLookup, StoreOffer
from baton.protocol.liveness import Heartbeat, Role

log = logging.getLogger(__name__)

MAX_LOOKUP = 1_024  # blocks
MAX_OFFER = 256  # blocks a message
SULK_S = 1.0  # how long a store that did not answer is left alone
_STORE_SHARE = 0.75  # of a lookup's time that the store may spend on slower tiers
_FOUND = Codec(StoreFound)


class StoreClient:
    """One worker's link to the KV store of its host, or failing that to the oldest one."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        puller: Puller,
        *,
        worker: str,
        epoch: int,
        fingerprint: str,
        block_bytes: int,
        address: Address,
        secret: str,
        offers_per_s: float = 500.0,
    ) -> None:
        """Speaks for `worker`.

        Args:
            puller: pulls into the worker's pool.
            address: where the worker's own blocks can be pulled, with `secret`.
            offers_per_s: blocks offered at most, on average; what is over is not offered.
        """
        self._bus = bus
        self._directory = directory
        self._puller = puller
        self._worker = worker
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._address = address
        self._secret = secret
        self._rate = offers_per_s
        self._allowance = float(MAX_OFFER)
        self._counted = 0.0
        self._sulking: dict[int, float] = {}
        self._host = socket.gethostname()

    def available(self) -> bool:
        """Whether there is a store to ask at all."""
        return self._store() is not None

    async def offer(self, blocks: Sequence[StoredBlock]) -> int:
        """Tells the store of blocks that may soon be evicted. Returns how many; no answer comes."""
        store = self._store()
        now = asyncio.get_running_loop().time()
        self._allowance = min(MAX_OFFER, self._allowance + (now - self._counted) * self._rate)
        self._counted = now
        chosen = list(blocks[: int(self._allowance)])
        if store is None or not chosen:
            return 0
        self._allowance -= len(chosen)
        message = StoreOffer(
            worker=self._worker,
            epoch=self._epoch,
            fingerprint=self._fingerprint,
            block_bytes=self._block_bytes,
            address=self._address,
            secret=self._secret,
            blocks=chosen,
        )
        try:
            await self._bus.publish(store.subject, message)
        except (BusDown, MalformedMessage) as error:
            log.debug("blocks not offered: %s", error)
            return 0
        return len(chosen)

    async def lookup(
        self, hashes: BlockHashes, tokens: TokenIds, parent: int, *, budget_s: float = 0.02
    ) -> StoreFound | None:
        """The leading blocks of a chain that the store holds, their identity compared.

        Args:
            hashes: uint64 [n], in chain order.
            tokens: uint32 [n * block_size], the tokens of those blocks.
            parent: hash of the block before the first one, or the root's.
            budget_s: how long it may take.

        Returns:
            Blocks to `fetch` within `lease_ms`; None when there is none, or no store, or no answer in time.
        """
        store = self._store()
        if store is None or not len(hashes):
            return None
        asked = StoreLookup(
            fingerprint=self._fingerprint,
            hashes=pack_hashes(hashes[:MAX_LOOKUP]),
            budget_ms=int(budget_s * 1000 * _STORE_SHARE),
        )
        try:
            found: StoreFound = await self._bus.call(store.subject, asked, _FOUND, timeout_s=budget_s)
        except (BusDown, NoResponder, CallTimeout, CallRejected, MalformedMessage) as error:
            self._sulk(store.epoch)
            log.debug("KV store %s: %s", store.id, error)
            return None
        width = len(tokens) // len(hashes)
        found.blocks = found.blocks[: _proven(found.blocks, hashes, tokens, parent, width)]
        return found if found.blocks and found.address is not None else None

    async def fetch(self, found: StoreFound, dest: Sequence[int]) -> int:
        """Pulls the blocks found into slots `dest`; returns how many leading ones are here and verified."""
        if found.address is None:
            return 0
        count = min(len(dest), len(found.blocks))
        refs = [block.ref for block in found.blocks[:count]]
        try:
            await self._puller.pull(found.address, found.secret, found.epoch, refs, dest[:count])
        except PullError as error:
            log.debug("blocks from the KV store: %s", error)
            if error.kind in ("unreachable", "timeout"):
                self._sulk(found.epoch)
            return error.done
        return count

    def _store(self) -> Heartbeat | None:
        """The store of this host, else the oldest; none that has just failed us."""
        now = asyncio.get_running_loop().time()
        stores = [
            store
            for store in self._directory.live(Role.KVSTORE)
            if self._sulking.get(store.epoch, 0.0) <= now
        ]
        return next((store for store in stores if store.host == self._host), stores[0] if stores else None)

    def _sulk(self, epoch: int) -> None:
        now = asyncio.get_running_loop().time()
        self._sulking = {other: until for other, until in self._sulking.items() if until > now}
        self._sulking[epoch] = now + SULK_S


def _proven(blocks: list[StoredBlock], hashes: BlockHashes, tokens: TokenIds, parent: int, width: int) -> int:
    """How many leading blocks are what was asked for: the hash found them, parent and tokens decide."""
    for index, (block, expected) in enumerate(zip(blocks, hashes.tolist(), strict=False)):
        own = pack_tokens(tokens[index * width : (index + 1) * width])
        if (block.hash, block.parent, block.tokens) != (expected, parent, own):
            return index
        parent = expected
    return min(len(blocks), len(hashes))
