"""KV blocks: who holds which slot, what the free ones still contain, and which one goes next.

    every slot is in one of three places

      held     references >= 1: in the table of one or more sequences; never evicted
      blank    free, holds nothing anyone could ask for: taken first
      cached   free, but in the prefix index: found again by a hit, taken last, the oldest first

               allocate                          allocate (evicts: leaves the index)
      blank ------------> held <---------------------------------------- cached
        ^                 | ^            match (hit)                        ^  |
        +-----------------+ +-----------------------------------------------|--+
           release, not indexed              release, indexed               |
                          +-------------------------------------------------+

A held block may be in the index too: that is how running sequences share a prefix. The index maps a chained
hash to a slot, and the hash only finds: parent, salt and token ids are compared before a block is used.
`generations` rises each time a slot is handed out for writing; peers that read the pool compare it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol


class Generations(Protocol):
    """An array of counters, one a slot: a list, or uint64 [num_blocks] in memory shared with peers."""

    def __getitem__(self, slot: int, /) -> Any: ...
    def __setitem__(self, slot: int, value: Any, /) -> None: ...


class Block(NamedTuple):
    """What a full block contains: enough to prove that it is the one asked for."""

    key: int  # its chained hash
    parent: int  # hash of the block before it, or the root's
    tokens: bytes  # its own ids, little-endian uint32
    salt: str = ""


class BlockPool:
    """Slots 0 to num_blocks - 1, of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, generations: Generations) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.generations = generations
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._content: dict[int, Block] = {}  # slot -> what it holds, of indexed slots
        self._index: dict[int, int] = {}  # hash -> slot
        self._news: dict[int, bool] = {}  # hash -> stored (or removed) since the last drain

    @property
    def free(self) -> int:
        """Slots that `allocate` can give, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Slots that nobody holds and whose content a later prompt may reuse."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Slots held by sequences and reservations."""
        return self.num_blocks - self.free

    def allocate(self, count: int) -> list[int] | None:
        """`count` private slots with one reference each, or None if there are not so many."""
        if count > self.free:
            return None
        slots = []
        for _ in range(count):
            slot = self._blank.pop() if self._blank else self._evict()
            self._references[slot] = 1
            self.generations[slot] += 1
            slots.append(slot)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Give up one reference to each of a chain's slots.

        The tail is freed first: a chain is useful only from its root, so its end must be evicted before it.
        """
        for slot in reversed(list(slots)):
            self._references[slot] -= 1
            if self._references[slot] == 0:
                if slot in self._content:
                    self._cached[slot] = None
                else:
                    self._blank.append(slot)

    def find(self, chain: Iterable[Block]) -> list[int]:
        """Slots of the longest indexed run from the chain's start."""
        slots = []
        for block in chain:
            slot = self._index.get(block.key)
            if slot is None or self._content[slot] != block:
                break
            slots.append(slot)
        return slots

    def pin(self, slots: Iterable[int]) -> None:
        """One more reference to each of these, which `find` has just returned."""
        for slot in slots:
            if not self._references[slot]:
                del self._cached[slot]
            self._references[slot] += 1

    def match(self, chain: Iterable[Block]) -> list[int]:
        """`find` and `pin`."""
        slots = self.find(chain)
        self.pin(slots)
        return slots

    def register(self, slot: int, block: Block) -> None:
        """Enter a held slot, full and computed, in the index.

        When an equal block, or another of the same hash, is there already, the newcomer stays out: it serves
        its own sequence and becomes blank when released.
        """
        if block.key not in self._index and slot not in self._content:
            self._index[block.key] = slot
            self._content[slot] = block
            self._tell(block.key, stored=True)

    def lru_candidates(self, count: int) -> list[tuple[int, Block]]:
        """The `count` cached slots that would be evicted next, oldest first."""
        return [(slot, self._content[slot]) for slot in islice(self._cached, count)]

    def indexed(self) -> Iterator[int]:
        """Every hash in the index."""
        return iter(self._index)

    def drain_events(self) -> tuple[list[int], list[int]]:
        """Hashes stored and removed since the last call, net: nothing that came and went in between.

        A reader applies the removals first, then the stores.
        """
        stored = [key for key, is_stored in self._news.items() if is_stored]
        removed = [key for key, is_stored in self._news.items() if not is_stored]
        self._news.clear()
        return stored, removed

    def _evict(self) -> int:
        slot, _ = self._cached.popitem(last=False)
        block = self._content.pop(slot)
        del self._index[block.key]
        self._tell(block.key, stored=False)
        return slot

    def _tell(self, key: int, *, stored: bool) -> None:
        if self._news.get(key, stored) != stored:
            del self._news[key]
        else:
            self._news[key] = stored

    def check(self, tables: Iterable[Iterable[int]] = ()) -> None:
        """Verify every invariant.

        Args:
            tables: the block tables of all who hold slots here; their uses must add up to the references.

        Raises:
            AssertionError: one does not hold.
        """
        held = {slot for slot in range(self.num_blocks) if self._references[slot]}
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a slot is blank twice"
        assert not held & blank and not held & cached and not blank & cached, "a slot is in two places"
        assert len(held) + len(blank) + len(cached) == self.num_blocks, "a slot is lost"
        assert min(self._references, default=0) >= 0, "a slot was released too often"
        assert cached <= self._content.keys(), "a cached slot has no content"
        assert not blank & self._content.keys(), "a blank slot is in the index"
        assert {block.key: slot for slot, block in self._content.items()} == self._index, "index and content"
        uses = [0] * self.num_blocks
        for table in tables:
            for slot in table:
                uses[slot] += 1
        assert uses == self._references, "references differ from the tables"
