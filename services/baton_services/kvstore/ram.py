"""The RAM tier: a bounded LRU of blocks, found by fingerprint and hash, read by slot and generation."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.protocol.handoff import BlockRef
from baton.protocol.kvevents import StoredBlock

Key = tuple[str, int]  # fingerprint, hash

OVERHEAD_BYTES = 512  # what an entry takes beside its block and tokens
_LOOK_FOR_VICTIMS = 4_096  # pinned entries passed over before a new block is refused


@dataclass(slots=True)
class Entry:
    """One block and what proves its identity. `data` is never written again."""

    key: Key
    parent: int
    tokens: bytes
    checksum: int
    data: bytes | bytearray
    slot: int = 0
    generation: int = 0
    pinned_until: float = 0.0

    @property
    def size(self) -> int:
        return len(self.data) + len(self.tokens) + OVERHEAD_BYTES

    def described(self) -> StoredBlock:
        """How a worker is told of it."""
        return StoredBlock(
            self.key[1], self.parent, self.tokens, BlockRef(self.slot, self.generation, self.checksum)
        )


class RamTier:
    """Blocks in this process's memory; a `BlockSource` for the block server. Times are seconds, monotonic."""

    def __init__(self, capacity: int) -> None:
        """Holds at most `capacity` bytes."""
        self.capacity = capacity
        self.bytes = 0
        self.evicted = 0
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # the least recently used first
        self._slots: dict[int, Entry] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def add(self, entry: Entry, now: float) -> bool:
        """Takes a block in, evicting the least recently used. False: it is here, or there is no room.

        Another block of the same hash keeps its place: it has as good a claim, and may be in use.
        """
        if entry.key in self._entries or not self._make_room(entry.size, now):
            return False
        self._next += 1
        entry.slot, entry.generation = self._next % 2**32, self._next
        self._entries[entry.key] = entry
        self._slots[entry.slot] = entry
        self.bytes += entry.size
        return True

    def find(self, key: Key) -> Entry | None:
        """The block, if it is here."""
        return self._entries.get(key)

    def pin(self, entry: Entry, until: float) -> None:
        """Marks a block as the most recently used, and keeps it from eviction for a time."""
        if self._entries.get(entry.key) is entry:
            self._entries.move_to_end(entry.key)
            entry.pinned_until = max(entry.pinned_until, until)

    def resolve(self, slot: int, generation: int) -> memoryview | None:
        """The block's bytes, if it is still here."""
        entry = self._slots.get(slot)
        if entry is None or entry.generation != generation:
            return None
        return memoryview(entry.data)

    def _make_room(self, size: int, now: float) -> bool:
        excess = self.bytes + size - self.capacity
        if size > self.capacity:
            return False
        victims: list[Entry] = []
        for passed, entry in enumerate(self._entries.values()):
            if excess <= 0 or passed >= _LOOK_FOR_VICTIMS:
                break
            if entry.pinned_until <= now:
                victims.append(entry)
                excess -= entry.size
        if excess > 0:
            return False
        for entry in victims:
            del self._entries[entry.key]
            del self._slots[entry.slot]
            self.bytes -= entry.size
            self.evicted += 1
        return True
