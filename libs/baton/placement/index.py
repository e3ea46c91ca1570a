"""The prefix index: which workers hold which KV blocks, by chained block hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Worker = tuple[str, int]  # id, epoch


class PrefixIndex:
    """Hash -> workers that hold the block. Hashes are chained, so a hit on block n implies all before it.

    The index is a hint: a worker decides what it really holds when it admits.
    """

    def __init__(self) -> None:
        self._holders: dict[int, set[Worker]] = {}
        self._blocks: dict[Worker, set[int]] = {}

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())

    def store(self, worker: Worker, hashes: Iterable[int]) -> None:
        mine = self._blocks.setdefault(worker, set())
        for value in hashes:
            mine.add(value)
            self._holders.setdefault(value, set()).add(worker)

    def remove(self, worker: Worker, hashes: Iterable[int]) -> None:
        mine = self._blocks.get(worker)
        if mine is None:
            return
        for value in hashes:
            mine.discard(value)
            self._let_go(worker, value)

    def drop(self, worker: Worker) -> None:
        """Forgets all that a worker holds."""
        for value in self._blocks.pop(worker, ()):
            self._let_go(worker, value)

    def hits(self, hashes: Sequence[int]) -> dict[Worker, int]:
        """Leading blocks of the chain that each worker holds; workers with none are left out."""
        found: dict[Worker, int] = {}
        left: set[Worker] | None = None
        for depth, value in enumerate(hashes):
            holders = self._holders.get(value)
            still = set() if holders is None else holders if left is None else left & holders
            if left is not None:
                for worker in left - still:
                    found[worker] = depth
            left = set(still)
            if not left:
                break
        for worker in left or ():
            found[worker] = len(hashes)
        return found

    def _let_go(self, worker: Worker, value: int) -> None:
        holders = self._holders.get(value)
        if holders is not None:
            holders.discard(worker)
            if not holders:
                del self._holders[value]
