"""How long a placement that joins the queue now will wait, judged by how fast the queue has been emptied."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
KEPT = 8_192


class Backlog:
    """Counts placements in a sliding window. Pure: `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._placed: deque[float] = deque(maxlen=KEPT)
        self._busy_since: float | None = None  # something has waited without a break since then

    def placed(self, now: float) -> None:
        self._placed.append(now)

    def empty(self) -> None:
        """Nothing waits: the rate of an idle queue says nothing about a full one."""
        self._busy_since = None

    def wait_s(self, queued: int, now: float) -> float:
        """The expected wait behind `queued` others; 0 while too little is known."""
        if not queued:
            self.empty()
            return 0.0
        if self._busy_since is None:
            self._busy_since = now
        since = max(self._busy_since, now - WINDOW_S)
        while self._placed and self._placed[0] < since:
            self._placed.popleft()
        watched = now - since
        if watched < 1.0:
            return 0.0
        if not self._placed:  # nothing moves: as long as nothing has so far
            return now - self._busy_since
        return queued * watched / len(self._placed)
