"""The worker's side of the KV store: offers blocks before they are evicted, brings them back on a hit."""

from __future__ import annotations

import asyncio

import numpy as np

from baton.bus.pace import to_next
from baton.engine.block_pool import Block
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.kvcache.hashing import chain, root_hash
from baton.kvcache.pool import KvPool, checksum
from baton.kvcache.store_client import StoreClient
from baton.protocol.handoff import BlockRef
from baton.protocol.kvevents import StoredBlock

ROUND_S = 0.5
IDLE_ROUND_S = 1.0
# Blocks near eviction are offered once less than this share of the pool is blank.
SCARCE = 0.25
OFFER_BLOCKS = 64
# Fewer blocks than this are recomputed faster than they are asked for.
WORTH_BLOCKS = 4


class StoreTier:
    """Write-behind and read-ahead. The store pulls what it is offered, as long as that stands."""

    def __init__(self, client: StoreClient, engine: Engine, pool: KvPool) -> None:
        self._client = client
        self._engine = engine
        self._pool = pool
        self._offered: set[int] = set()

    def worth_asking(self, sequence: Sequence) -> bool:
        """Whether the store may hold more of this prompt than the pool does."""
        if not self._engine.config.prefix_cache or not self._client.available():
            return False
        size = self._engine.pool.block_size
        held = self._engine.prefix_hit(sequence.tokens, sequence.salt) // size
        return sequence.readable // size - held >= WORTH_BLOCKS

    async def fetch(self, sequence: Sequence) -> int:
        """Brings leading blocks of the prompt into the pool as cached blocks; returns how many."""
        engine, size = self._engine, self._engine.pool.block_size
        tokens = sequence.tokens
        held = engine.prefix_hit(tokens, sequence.salt) // size
        most = sequence.readable // size
        ids = np.asarray(tokens, dtype=np.uint32)
        root = root_hash(engine.config.fingerprint, sequence.salt)
        hashes = chain(root, ids, size)
        parent = int(hashes[held - 1]) if held else root
        found = await self._client.lookup(hashes[held:most], ids[held * size : most * size], parent)
        if found is None:
            return 0
        slots = engine.borrow(len(found.blocks))
        if slots is None:
            return 0
        kept = 0
        try:
            kept = await self._client.fetch(found, slots)
        finally:
            engine.give_back(slots[kept:])
            if kept:
                engine.seed_cached(tokens, sequence.salt, held, slots[:kept])
        return kept

    async def run(self) -> None:
        """Offers what will be evicted next while free memory is scarce."""
        while True:
            await asyncio.sleep(ROUND_S if self._scarce else to_next(IDLE_ROUND_S))
            if self._client.available():
                await self._offer()

    @property
    def _scarce(self) -> bool:
        pool = self._engine.pool
        return pool.free - pool.cached <= SCARCE * pool.num_blocks

    async def _offer(self) -> None:
        pool = self._engine.pool
        if not self._scarce:
            return
        near = pool.lru_candidates(OFFER_BLOCKS)
        blocks = [self._describe(slot, block) for slot, block in near if block.key not in self._offered]
        taken = await self._client.offer(blocks) if blocks else 0
        self._offered &= {block.key for _, block in near}
        self._offered |= {block.hash for block in blocks[:taken]}

    def _describe(self, slot: int, block: Block) -> StoredBlock:
        ref = BlockRef(slot, int(self._pool.generations[slot]), checksum(self._pool.view(slot)))
        return StoredBlock(block.key, block.parent, block.tokens, ref)
