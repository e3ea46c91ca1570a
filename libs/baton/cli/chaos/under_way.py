"""One scenario under way, as its coroutine sees it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.cli.chaos.load import Load
from baton.cli.chaos.requests import Request
from baton.cli.chaos.stage import Stage

IN_FLIGHT = 4  # at least so many requests run at each blow
ANY_MOMENT_S = 1.0


@dataclass(slots=True)
class Run:
    """One scenario under way."""

    stage: Stage
    load: Load
    requests: list[Request]
    every_s: float
    excused: Callable[[Request], bool] = lambda request: False  # had to fail, and did so well
    blows: int = 0
    flying: list[int] = field(default_factory=list)  # requests in flight, at each blow
    back_s: list[float] = field(default_factory=list)  # until a killed process was ready again
    notes: list[str] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    async def in_flight(self) -> bool:
        """Waits until enough requests run; False once the load is over."""
        while len(self.load.running) < min(IN_FLIGHT, self.load.at_once):
            if self.load.done >= len(self.requests):
                return False
            await asyncio.sleep(0.01)
        return True

    async def some_moment(self) -> bool:
        """As `in_flight`, but not just when a burst begins: blows fall on each leg of a request."""
        while await self.in_flight():
            await asyncio.sleep(self.rng.uniform(0.0, ANY_MOMENT_S))
            if len(self.load.running) >= min(IN_FLIGHT, self.load.at_once):
                self.flying.append(len(self.load.running))
                return True
        return False
