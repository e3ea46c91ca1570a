"""What API keys have used in the last minute, and whether one more request fits. Time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.protocol.limits import KeySpent, Settle, Take, Taken

MINUTE = 60  # seconds


class Window:
    """Amounts of the last minute, by the second.

    A second counts until all of it is a minute old, so that no minute ever holds more than the limit.
    """

    def __init__(self, ages: list[tuple[int, int]] | None = None, now: float = 0.0) -> None:
        self._seconds = {int(now) - age: amount for age, amount in ages or []}

    def add(self, at: float, amount: int) -> None:
        """Adds to the second `at`; a negative amount takes away what is there, at most."""
        second = int(at)
        left = self._seconds.get(second, 0) + amount
        if left > 0:
            self._seconds[second] = left
        else:
            self._seconds.pop(second, None)

    def used(self, now: float) -> int:
        for second in [second for second in self._seconds if second + 1 + MINUTE <= now]:
            del self._seconds[second]
        return sum(self._seconds.values())

    def wait(self, now: float, amount: int, limit: int) -> float:
        """Seconds until `amount` fits under `limit`; infinite if it never does."""
        over = self.used(now) + amount - limit
        if over <= 0:
            return 0.0
        for second in sorted(self._seconds):
            over -= self._seconds[second]
            if over <= 0:
                return second + 1 + MINUTE - now
        return math.inf

    def empty_in(self, now: float) -> float:
        """Seconds until nothing of it counts any more."""
        return max(self._seconds) + 1 + MINUTE - now if self.used(now) else 0.0

    def ages(self, now: float) -> list[tuple[int, int]]:
        self.used(now)
        return sorted(((int(now) - second, amount) for second, amount in self._seconds.items()), reverse=True)


@dataclass(slots=True)
class Budget:
    """One key's use."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    running: dict[str, int] = field(default_factory=dict)  # by gateway

    def take(self, ask: Take, now: float) -> Taken:
        """Books a request, or says which limit forbids it and until when."""
        waits = {}
        others = sum(count for gateway, count in self.running.items() if gateway != ask.gateway)
        if ask.concurrent and others + ask.running > ask.concurrent:
            waits["concurrent"] = 1.0  # nobody knows when one ends
        if ask.requests_per_minute:
            waits["requests"] = self.requests.wait(now, 1, ask.requests_per_minute)
        if ask.tokens_per_minute:
            waits["tokens"] = self.tokens.wait(now, ask.tokens, ask.tokens_per_minute)
        refused = max(waits, key=lambda limit: waits[limit], default="")
        wait = waits.get(refused, 0.0)
        if wait > 0:
            return self._answer(ask, now, refused, min(wait, MINUTE + 1.0))
        self.running[ask.gateway] = ask.running
        self.requests.add(now, 1)
        self.tokens.add(now, ask.tokens)
        return self._answer(ask, now, "", 0.0)

    def settle(self, settle: Settle, now: float) -> None:
        """Puts right what was taken: less is given back where it was taken, more counts from now on."""
        at = now - settle.age_ms / 1000 if settle.tokens < 0 else now
        self.tokens.add(at, settle.tokens)
        self.running[settle.gateway] = settle.running

    def _answer(self, ask: Take, now: float, refused: str, wait: float) -> Taken:
        return Taken(
            refused=refused,
            wait_ms=math.ceil(wait * 1000),
            requests_left=max(0, ask.requests_per_minute - self.requests.used(now)),
            tokens_left=max(0, ask.tokens_per_minute - self.tokens.used(now)),
            requests_reset_ms=math.ceil(self.requests.empty_in(now) * 1000),
            tokens_reset_ms=math.ceil(self.tokens.empty_in(now) * 1000),
        )


class Budgets:
    """All keys' use, as this gateway knows it."""

    def __init__(self) -> None:
        self._budgets: dict[str, Budget] = {}
        self.changed: set[str] = set()  # since it was last told to the others

    def take(self, ask: Take, now: float) -> Taken:
        self.changed.add(ask.key)
        return self._of(ask.key).take(ask, now)

    def settle(self, settle: Settle, now: float) -> None:
        self.changed.add(settle.key)
        self._of(settle.key).settle(settle, now)

    def adopt(self, spent: KeySpent, now: float, *, unless_more: bool) -> None:
        """Goes by what another gateway tells of a key, unless more is known here, and that is to count."""
        budget = self._of(spent.key)
        requests, tokens = Window(spent.requests, now), Window(spent.tokens, now)
        here, there = (
            a.used(now) + b.used(now) for a, b in ((budget.requests, budget.tokens), (requests, tokens))
        )
        if not unless_more or there > here:
            budget.requests, budget.tokens = requests, tokens

    def run(self, gateway: str, running: dict[str, int]) -> None:
        """All that a gateway has running; what it does not name has ended."""
        for key, budget in self._budgets.items():
            if gateway in budget.running and key not in running:
                del budget.running[gateway]
        for key, count in running.items():
            self._of(key).running[gateway] = count

    def tell(self, keys: set[str], now: float) -> list[KeySpent]:
        """What is known of these keys, and has not become nothing."""
        told = []
        for key in sorted(keys & self._budgets.keys()):
            budget = self._budgets[key]
            told.append(KeySpent(key, budget.requests.ages(now), budget.tokens.ages(now)))
        return told

    def forget(self, now: float) -> None:
        """Drops keys of which nothing counts any more."""
        for key, budget in list(self._budgets.items()):
            idle = not any(budget.running.values())
            if idle and not (budget.requests.used(now) or budget.tokens.used(now)):
                del self._budgets[key]

    def known(self) -> set[str]:
        """Every key of which something counts."""
        return set(self._budgets)

    def _of(self, key: str) -> Budget:
        return self._budgets.setdefault(key, Budget())
