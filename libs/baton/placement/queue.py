"""The admission queue: placements that wait for room, by class; in it replays first, then by age."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.placement.view import Key
from baton.protocol.placing import Place, Placement

T = TypeVar("T")
Class = tuple[int, bool]  # priority, and whether it is a replay or a move


@dataclass(slots=True)
class Waiting(Generic[T]):
    """One placement that waits. `reply` is the caller's; asked again, the newest `Place` and reply count."""

    place: Place
    since: float
    deadline: float
    reply: T


class AdmissionQueue(Generic[T]):
    """Bounded. Higher classes first; within one, what was placed before and lost its worker, then by age.

    A deadline is never overrun in silence.

    When the first cannot be placed, later ones are still tried, so that a request too big for now does not
    hold up small ones; `patience` failed tries end a round, so that a round stays cheap however many wait.
    """

    def __init__(self, limit: int, *, patience: int = 8) -> None:
        self._limit = limit
        self._patience = patience
        self._classes: dict[Class, dict[Key, Waiting[T]]] = {}  # each in order of arrival
        self._class_of: dict[Key, Class] = {}
        self._earliest = float("inf")  # no deadline is before this

    def __len__(self) -> int:
        return len(self._class_of)

    def put(self, place: Place, reply: T, now: float) -> bool:
        """Queues a placement, or takes the newer word of one that waits; False when the queue is full."""
        key = (place.request, place.attempt)
        deadline = now + place.deadline_ms / 1000
        its_class = self._class_of.get(key)
        if its_class is not None:
            known = self._classes[its_class][key]
            known.place, known.reply, known.deadline = place, reply, deadline
        elif len(self._class_of) >= self._limit:
            return False
        else:
            its_class = self._class_of[key] = (place.priority, place.attempt > 0)
            waiting = self._classes.setdefault(its_class, {})
            waiting[key] = Waiting(place, now, deadline, reply)
        self._earliest = min(self._earliest, deadline)
        return True

    def remove(self, key: Key) -> Waiting[T] | None:
        """Takes one out, if it waits."""
        its_class = self._class_of.pop(key, None)
        if its_class is None:
            return None
        waiting = self._classes[its_class]
        entry = waiting.pop(key)
        if not waiting:
            del self._classes[its_class]
        return entry

    def expired(self, now: float) -> list[Waiting[T]]:
        """Takes out those whose deadline has come, wherever they stand."""
        if now < self._earliest:
            return []
        late = [key for key, entry in self._all() if entry.deadline <= now]
        taken = [entry for key in late if (entry := self.remove(key)) is not None]
        self._earliest = min((entry.deadline for _, entry in self._all()), default=float("inf"))
        return taken

    def overdue(self, since: float) -> list[Waiting[T]]:
        """Takes out what has waited since before then and never ran (a first attempt)."""
        late = [key for key, entry in self._all() if entry.since < since and not entry.place.attempt]
        return [entry for key in late if (entry := self.remove(key)) is not None]

    def drain(self, attempt: Callable[[Waiting[T]], Placement | None]) -> list[tuple[Waiting[T], Placement]]:
        """Tries to place what waits, in order; takes out and returns what could be."""
        placed: list[tuple[Key, Waiting[T], Placement]] = []
        failures = 0
        for key, entry in self._all():
            answer = attempt(entry)
            if answer is not None:
                placed.append((key, entry, answer))
            elif (failures := failures + 1) >= self._patience:
                break
        for key, _, _ in placed:
            self.remove(key)
        return [(entry, answer) for _, entry, answer in placed]

    def clear(self) -> list[Waiting[T]]:
        """Takes out all."""
        taken = [entry for _, entry in self._all()]
        self._classes.clear()
        self._class_of.clear()
        self._earliest = float("inf")
        return taken

    def _all(self) -> Iterator[tuple[Key, Waiting[T]]]:
        for its_class in sorted(self._classes, reverse=True):
            yield from self._classes[its_class].items()
