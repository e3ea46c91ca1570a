"""Which blocks a worker or the KV store holds, and moving blocks to and from the store."""

from __future__ import annotations

from baton.protocol.base import Message, Row
from baton.protocol.handoff import Address, BlockRef


class KvEvents(Message):
    """Worker -> routers: blocks that entered and left its prefix index, in order, numbered without a gap.

    `number` counts messages from 1 for each epoch. Removals come first, then stores.
    """

    worker: str
    epoch: int
    number: int
    stored: bytes = b""  # little-endian uint64 hashes
    removed: bytes = b""


class KvSnapshot(Message):
    """Router -> worker (a call): all hashes you hold, in pieces; ask with the `cursor` of the last answer."""

    cursor: int = 0


class KvSnapshotPiece(Message):
    """Worker -> router: up to 256 KB of hashes, as of event `number`; `cursor` 0: the last piece."""

    epoch: int
    number: int
    hashes: bytes
    cursor: int = 0


class StoredBlock(Row):
    """A full block with what proves its identity: the hash finds, the tokens decide."""

    hash: int
    parent: int  # hash of the block before, or the root's salt hash
    tokens: bytes  # its own token ids
    ref: BlockRef


class StoreOffer(Message):
    """Worker -> KV store: these blocks may soon be evicted here; pull them if you like. No answer."""

    worker: str
    epoch: int
    fingerprint: str
    block_bytes: int
    address: Address
    secret: str
    blocks: list[StoredBlock]


class StoreLookup(Message):
    """Worker -> KV store (a call): which leading blocks of this chain do you hold? Answered `StoreFound`."""

    fingerprint: str
    hashes: bytes  # in chain order
    budget_ms: int = 15  # how long the store may spend on slower tiers before it answers


class StoreFound(Message):
    """KV store -> worker: the leading blocks it holds, kept for `lease_ms`, and where to pull them."""

    blocks: list[StoredBlock] = []
    epoch: int = 0
    address: Address | None = None
    secret: str = ""
    lease_ms: int = 0
