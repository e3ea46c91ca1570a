"""When to do what is done all the time."""

from __future__ import annotations

import time

LEAST_S = 0.05


def to_next(interval_s: float) -> float:
    """Seconds until the clock's next multiple of `interval_s`.

    What processes do once a second they do at the same moment, so that each of a host's wakes once to do it
    and to hear of it from all others: most of what rest costs is waking up. Only for pauses; never for
    time-outs, as the clock may be set.
    """
    left = interval_s - time.time() % interval_s
    return left if left > LEAST_S else left + interval_s
