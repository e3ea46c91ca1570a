"""How many requests of a model are run at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from baton.protocol.liveness import Heartbeat

ROUNDS = 2  # what runs, and as many that wait for their places, as those may all be free at one moment
FLOOR = 4  # while nobody knows how much room there is
BACK_OFF = 0.7
LONGEST_PAUSE_S = 30.0


def room(workers: Iterable[Heartbeat], own: int) -> int:
    """Requests that keep these decode workers full, beside those of others than batch.

    `own`: how many of the batch services' requests run now.
    """
    slots = running = 0
    for beat in workers:
        slots += beat.worker.max_sequences if beat.worker is not None else 0
        running += beat.load.running + beat.load.waiting if beat.load is not None else 0
    if not slots:
        return FLOOR
    return max(1, ROUNDS * slots - max(0, running - own))


class Pace:
    """Full room, less after each refusal, more again with each success; a pause when asked for one."""

    def __init__(self) -> None:
        self._share = 1.0
        self._until = 0.0

    def limit(self, room: int, now: float) -> int:
        return 0 if now < self._until else max(1, int(room * self._share))

    def refused(self, now: float, wait_s: float) -> None:
        """A 429 or 503 that asks to wait so long. Refusals of one moment count once."""
        if now >= self._until:
            self._share = max(0.05, self._share * BACK_OFF)
        self._until = max(self._until, now + min(wait_s, LONGEST_PAUSE_S))

    def succeeded(self, room: int) -> None:
        self._share = min(1.0, self._share + 1 / max(8, room))
