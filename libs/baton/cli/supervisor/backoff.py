"""When a process that died is started again. Pure: time comes in as an argument, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

BASE_S = 0.5
CAP_S = 10.0
HEALTHY_S = 10.0
GIVE_UP = 5


@dataclass(slots=True)
class RestartPolicy:
    """At once the first time, then 0.5 s doubling to 10 s; forgotten after 10 s of health."""

    deaths: int = 0
    failed_starts: int = 0  # in a row, for one and the same reason
    reason: str = ""
    ready_at: float | None = None

    def ready(self, now: float) -> None:
        """The process works: it answered on the bus."""
        if self.ready_at is None:
            self.ready_at = now

    def died(self, now: float, reason: str) -> float | None:
        """The process is gone. Seconds to wait before the next start; None: it will never start, give up."""
        if self.ready_at is None:
            self.failed_starts = self.failed_starts + 1 if reason == self.reason else 1
        else:
            self.failed_starts = 0
            if now - self.ready_at >= HEALTHY_S:
                self.deaths = 0
        self.reason, self.ready_at = reason, None
        if self.failed_starts >= GIVE_UP:
            return None
        self.deaths += 1
        return 0.0 if self.deaths == 1 else min(CAP_S, BASE_S * 2 ** min(self.deaths - 2, 10))
