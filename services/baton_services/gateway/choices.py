"""All sequences of one HTTP request as one stream of deltas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from baton.protocol.errors import RequestError
from baton.protocol.request import Generate, TextDelta
from baton_services.gateway.exchange import Exchange
from baton_services.gateway.exchanges import Exchanges


class Choices:
    """The answers to a request's prompts, told apart by their index: prompt times choices plus choice.

    A prompt's choices are sent off as one, so that it is read once for all of them.
    """

    def __init__(self, exchanges: Exchanges, prompts: list[list[Generate]]) -> None:
        self._exchanges = exchanges
        self._live: dict[int, Exchange] = {}
        self._ready: deque[int] = deque()
        self._arrived = asyncio.Event()
        self._parked = False  # `next` waits, and all that it has returned is dealt with
        self.sink: Callable[[int, TextDelta], bool] | None = None  # takes what it can while `next` waits
        self._deadline = time.monotonic() + prompts[0][0].deadline_ms / 1000
        self._prompts = prompts
        self.count = sum(map(len, prompts))

    @property
    def over(self) -> bool:
        """Whether every sequence that was sent off has ended by itself."""
        return all(exchange.over for exchange in self._live.values())

    @property
    def characters(self) -> int:
        """Of the answers so far."""
        return sum(exchange.written for exchange in self._live.values())

    def held(self) -> int:
        """Bytes of the answers that nobody has taken yet, about."""
        return sum(exchange.held for exchange in self._live.values())

    async def open(self) -> None:
        """Sends each prompt off.

        Raises:
            RequestError: no such model, or nobody takes it.
        """
        for choices in self._prompts:
            first = len(self._live)
            for generate in choices:
                generate.deadline_ms = max(1, int((self._deadline - time.monotonic()) * 1000))
            wakes = [partial(self._wake, first + offset) for offset in range(len(choices))]
            exchanges = await self._exchanges.open(choices, wakes)
            self._live |= dict(enumerate(exchanges, start=first))

    async def next(self) -> tuple[int, TextDelta]:
        """The next delta and its index; what waits of one index is merged into one.

        Raises:
            RequestError: a sequence failed, and with it the request.
        """
        while True:
            while not self._ready:
                self._arrived.clear()
                self._parked = True
                try:
                    await self._arrived.wait()
                finally:
                    self._parked = False
            index = self._ready.popleft()
            delta = self._live[index].take()
            if delta is None:
                continue
            if delta.failure is not None:
                raise RequestError(delta.failure)
            self._ready.append(index)  # looked at again, after the others
            return index, delta

    async def close(self, reason: str) -> None:
        """Frees whatever has not ended by itself. Idempotent."""
        for exchange in self._live.values():
            await self._exchanges.close(exchange, reason)

    def _wake(self, index: int) -> None:
        if self.sink is not None and self._parked and not self._ready:
            exchange = self._live[index]
            delta = exchange.peek()
            if delta is not None and self.sink(index, delta):
                exchange.take()
                return
        self._ready.append(index)
        self._arrived.set()
