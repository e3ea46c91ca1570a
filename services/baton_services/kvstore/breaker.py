"""A circuit breaker: after some failures in a row a tier is left alone for a while."""

from __future__ import annotations


class Breaker:
    """Pure; times are seconds, monotonic. While open one try is let through each `off_s`."""

    def __init__(self, failures: int = 3, off_s: float = 2.0) -> None:
        self._limit = failures
        self._off_s = off_s
        self._failures = 0
        self._closed_again = 0.0

    def allows(self, now: float) -> bool:
        """Whether to try."""
        return now >= self._closed_again

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> bool:
        """Notes a failure; True when it opens the breaker."""
        self._failures += 1
        if self._failures < self._limit:
            return False
        self._closed_again = now + self._off_s
        return True
