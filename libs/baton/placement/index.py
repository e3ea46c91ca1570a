"""The prefix index: which workers hold which KV blocks, by chained block hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Worker = tuple[str, int]  # id, epoch


class PrefixIndex:
    """Hash -> workers that hold the block, as a bit mask: a lookup costs the same for one worker or for 64.

    The index is a hint: a worker decides what it really holds when it admits.

    A worker gives up a chain from its end, so what it holds of one has no holes, and the masks along a chain
    only lose bits: where they do is found by bisection (in a million entries each look misses the cache).
    Should there be a hole all the same, a hit may come out too long; it still ends with a block that is held.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # hash -> mask, never 0
        self._blocks: dict[Worker, set[int]] = {}
        self._bits: dict[Worker, int] = {}  # worker -> mask of its one bit
        self._workers: list[Worker] = []  # by bit number; a freed number keeps its last worker's name
        self._free: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        """Entries: a block that two workers hold counts twice."""
        return self._size

    def store(self, worker: Worker, hashes: Iterable[int]) -> None:
        """`worker` holds these blocks now. What it held before stays."""
        bit = self._bits.get(worker) or self._admit(worker)
        mine, holders = self._blocks[worker], self._holders
        before = len(mine)
        for value in hashes:
            mine.add(value)
            others = holders.get(value)
            holders[value] = bit if others is None else others | bit
        self._size += len(mine) - before

    def remove(self, worker: Worker, hashes: Iterable[int]) -> None:
        """`worker` no longer holds these blocks; those it never held are ignored."""
        bit = self._bits.get(worker)
        if bit is None:
            return
        mine = self._blocks[worker]
        for value in hashes:
            if value in mine:
                mine.remove(value)
                self._size -= 1
                self._let_go(bit, value)

    def drop(self, worker: Worker) -> None:
        """Forgets all that a worker holds, and the worker."""
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        mine = self._blocks.pop(worker)
        self._size -= len(mine)
        for value in mine:
            self._let_go(bit, value)
        self._free.append(bit.bit_length() - 1)

    def hits(self, hashes: Sequence[int]) -> dict[Worker, int]:
        """Leading blocks of the chain that each worker holds; workers with none are left out."""
        found: dict[Worker, int] = {}
        if not hashes:
            return found
        holders_of = self._holders.get
        left, end = holders_of(hashes[0], 0), len(hashes)
        low = 0  # all in `left` hold this one
        while left:
            high, at_high = end - 1, left & holders_of(hashes[end - 1], 0)
            if at_high == left:
                for worker in self._named(left):
                    found[worker] = end
                break
            while high - low > 1:
                middle = (low + high) // 2
                still = left & holders_of(hashes[middle], 0)
                if still == left:
                    low = middle
                else:
                    high, at_high = middle, still
            for worker in self._named(left ^ at_high):
                found[worker] = high
            left, low = at_high, high
        return found

    def _admit(self, worker: Worker) -> int:
        if self._free:
            number = self._free.pop()
            self._workers[number] = worker
        else:
            number = len(self._workers)
            self._workers.append(worker)
        self._blocks[worker] = set()
        self._bits[worker] = 1 << number
        return 1 << number

    def _let_go(self, bit: int, value: int) -> None:
        left = self._holders[value] & ~bit
        if left:
            self._holders[value] = left
        else:
            del self._holders[value]

    def _named(self, mask: int) -> Iterator[Worker]:
        while mask:
            lowest = mask & -mask
            yield self._workers[lowest.bit_length() - 1]
            mask ^= lowest
