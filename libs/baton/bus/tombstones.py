"""What was cancelled: a message of it that comes later is refused. Pure; time comes in as an argument."""

from __future__ import annotations

from collections import OrderedDict

KEEP_S = 60.0
LIMIT = 65_536


class Tombstones:
    """Cancelled requests. A cancel of attempt k covers all attempts up to k, for `keep_s` seconds.

    At most `limit` are kept; past that the oldest goes first, counted in `evicted`.
    """

    def __init__(self, keep_s: float = KEEP_S, limit: int = LIMIT) -> None:
        self.evicted = 0
        self._keep_s = keep_s
        self._limit = limit
        self._stones: OrderedDict[str, tuple[int, float]] = OrderedDict()  # request -> attempt, until

    def __len__(self) -> int:
        return len(self._stones)

    def add(self, request: str, attempt: int, now: float) -> None:
        """Cancels attempts up to `attempt`. `now`: monotonic seconds."""
        self._expire(now)
        former, _ = self._stones.pop(request, (attempt, now))
        self._stones[request] = (max(former, attempt), now + self._keep_s)
        while len(self._stones) > self._limit:
            self._stones.popitem(last=False)
            self.evicted += 1

    def refuses(self, request: str, attempt: int, now: float) -> bool:
        """Whether this attempt was cancelled within the last `keep_s` seconds."""
        self._expire(now)
        stone = self._stones.get(request)
        return stone is not None and attempt <= stone[0]

    def _expire(self, now: float) -> None:
        while self._stones:
            request, (_, until) = next(iter(self._stones.items()))
            if until > now:
                return
            del self._stones[request]
