"""Time travels as milliseconds remaining; each process turns it into its own monotonic clock. Pure."""

from __future__ import annotations

import math

LONGEST_MS = 24 * 3_600 * 1_000


def deadline(remaining_ms: int, now: float) -> float:
    """A deadline in seconds of the monotonic clock that says `now`. At least now, at most a day away."""
    return now + min(max(remaining_ms, 0), LONGEST_MS) / 1_000


def remaining_ms(deadline: float, now: float) -> int:
    """Milliseconds left as they are sent on, rounded down: a deadline never grows on its way. At least 0."""
    return min(max(0, math.floor((deadline - now) * 1_000)), LONGEST_MS)
