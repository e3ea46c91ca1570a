"""Who is alive, as heartbeats tell it. Pure: time comes in as monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from baton.protocol.liveness import Heartbeat, Role, State

Kind = Literal["joined", "updated", "left"]
Change = tuple[Heartbeat, Kind]

MISSED = 3  # intervals without a heartbeat after which a process counts as gone
SHORTEST_MS, LONGEST_MS = 20, 60_000
LIMIT = 4_096  # processes


@dataclass(slots=True)
class _Entry:
    beat: Heartbeat
    expires: float
    excluded_until: int = -1  # seq that a heartbeat needs for this process to count again


class Roster:
    """The newest heartbeat of every live process, by id. The newest epoch of an id is the one that counts."""

    def __init__(self) -> None:
        self.refused = 0  # heartbeats not taken, as the roster is full
        self._entries: dict[str, _Entry] = {}

    def heard(self, beat: Heartbeat, now: float) -> list[Change]:
        """Takes a heartbeat; what changed by it. One of an older epoch, or overtaken, changes nothing."""
        entry = self._entries.get(beat.id)
        if entry is not None and (beat.epoch, beat.seq) <= (entry.beat.epoch, entry.beat.seq):
            return []
        if beat.state == State.STOPPED:
            return self._remove(beat) if entry is not None else []
        changes: list[Change] = []
        if entry is not None and beat.epoch > entry.beat.epoch:
            changes.append((entry.beat, "left"))
            entry = None
        if entry is None:
            if beat.id not in self._entries and len(self._entries) >= LIMIT:
                self.refused += 1
                return changes
            self._entries[beat.id] = _Entry(beat, now + _patience_s(beat))
            return [*changes, (beat, "joined")]
        entry.beat, entry.expires = beat, now + _patience_s(beat)
        return [(beat, "updated")]

    def _remove(self, last: Heartbeat) -> list[Change]:
        """`last` says that it, or with a newer epoch its forerunner too, is gone."""
        entry = self._entries.pop(last.id)
        return [(last if last.epoch == entry.beat.epoch else entry.beat, "left")]

    def expire(self, now: float) -> list[Change]:
        """Removes those that have been silent too long."""
        silent = [entry.beat for entry in self._entries.values() if entry.expires <= now]
        for beat in silent:
            del self._entries[beat.id]
        return [(beat, "left") for beat in silent]

    def next_expiry(self) -> float | None:
        return min((entry.expires for entry in self._entries.values()), default=None)

    def forgive(self, now: float) -> None:
        """Everybody is as good as just heard: it was our connection that was silent."""
        for entry in self._entries.values():
            entry.expires = now + _patience_s(entry.beat)

    def exclude(self, instance: str, epoch: int) -> None:
        """Leaves this process out of `live` until it sends a heartbeat after now.

        The next one may be on its way already, so it takes the one after.
        """
        entry = self._entries.get(instance)
        if entry is not None and entry.beat.epoch == epoch:
            entry.excluded_until = entry.beat.seq + 2

    def live(self, role: Role, now: float, *, ready: bool = True) -> list[Heartbeat]:
        """Those of a role that count, oldest start first; `ready`: only those that take work."""
        beats = [
            entry.beat
            for entry in self._entries.values()
            if entry.beat.role == role
            and entry.expires > now
            and entry.beat.seq >= entry.excluded_until
            and (not ready or entry.beat.state == State.READY)
        ]
        return sorted(beats, key=lambda beat: (beat.started_ms, beat.epoch, beat.id))

    def get(self, instance: str, now: float) -> Heartbeat | None:
        """The newest heartbeat of a process that has not gone silent, excluded or not."""
        entry = self._entries.get(instance)
        return entry.beat if entry is not None and entry.expires > now else None

    def __iter__(self) -> Iterator[Heartbeat]:
        return iter([entry.beat for entry in self._entries.values()])


def _patience_s(beat: Heartbeat) -> float:
    return MISSED * min(max(beat.interval_ms, SHORTEST_MS), LONGEST_MS) / 1_000
