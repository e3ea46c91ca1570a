"""The admission queue: placements that wait for room, by class, then by age."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.placement.view import Key
from baton.protocol.placing import Place, Placement

T = TypeVar("T")


@dataclass(slots=True)
class Waiting(Generic[T]):
    """One placement that waits. `reply` is the caller's; asked again, the newest one counts."""

    place: Place
    since: float
    deadline: float
    reply: T
    gone: bool = field(default=False)


class AdmissionQueue(Generic[T]):
    """Bounded. Higher classes first, older first within a class; a deadline is never overrun in silence.

    Head of line: when the first cannot be placed, later ones of its class are still tried, so that a
    request too big for now does not hold up small ones; `patience` failed tries end a round.
    """

    def __init__(self, limit: int, *, patience: int = 32) -> None:
        self._limit = limit
        self._patience = patience
        self._heap: list[tuple[int, int, Waiting[T]]] = []
        self._by_key: dict[Key, Waiting[T]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._by_key)

    def put(self, place: Place, reply: T, now: float) -> bool:
        """Queues a placement, or takes the newer reply of one that waits; False when the queue is full."""
        key = (place.request, place.attempt)
        known = self._by_key.get(key)
        if known is not None:
            known.reply, known.deadline = reply, now + place.deadline_ms / 1000
            return True
        if len(self._by_key) >= self._limit:
            return False
        entry = Waiting(place, now, now + place.deadline_ms / 1000, reply)
        self._by_key[key] = entry
        heapq.heappush(self._heap, (-place.priority, next(self._order), entry))
        return True

    def remove(self, key: Key) -> None:
        entry = self._by_key.pop(key, None)
        if entry is not None:
            entry.gone = True

    def drain(
        self, now: float, attempt: Callable[[Waiting[T]], Placement | None]
    ) -> tuple[list[tuple[Waiting[T], Placement]], list[Waiting[T]]]:
        """Tries to place what waits: (placed, expired)."""
        placed: list[tuple[Waiting[T], Placement]] = []
        expired: list[Waiting[T]] = []
        kept: list[tuple[int, int, Waiting[T]]] = []
        failures = 0
        while self._heap and failures < self._patience:
            item = heapq.heappop(self._heap)
            entry = item[2]
            if entry.gone:
                continue
            if now >= entry.deadline:
                expired.append(entry)
            elif (answer := attempt(entry)) is not None:
                placed.append((entry, answer))
            else:
                failures += 1
                kept.append(item)
                continue
            self._by_key.pop((entry.place.request, entry.place.attempt), None)
        for item in kept:
            heapq.heappush(self._heap, item)
        return placed, expired
