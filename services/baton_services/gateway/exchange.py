"""One request between its HTTP handler and its tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from baton.protocol.errors import Failure, RequestError
from baton.protocol.placing import Target
from baton.protocol.request import Generate, TextDelta


@dataclass(slots=True)
class Exchange:
    """A live request as its gateway sees it.

    Deltas of a second tokenizer (the first one died) begin again at character 0: what has been taken
    already is cut off, so the client sees a pause and the same text.
    """

    generate: Generate
    deadline: float  # monotonic seconds
    owner: Target | None = None
    heard: float = field(default_factory=time.monotonic)
    characters: int = 0  # taken so far
    tokens: int = 0  # logprob entries taken so far
    over: bool = False  # the last delta has come, or the client has gone
    gap: bool = False  # text is missing: the owner must begin again
    _deltas: deque[TextDelta] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.generate.request

    def put(self, delta: TextDelta) -> None:
        """Takes a delta from the bus; drops what was taken before, notices what is missing."""
        if self.over:
            return
        self.heard = time.monotonic()
        if delta.start > self.characters:
            self.gap = True
            return
        seen = self.characters - delta.start
        delta.text = delta.text[seen:]
        delta.start = self.characters
        self.characters += len(delta.text)
        delta.tokens = delta.tokens[max(0, self.tokens - delta.token_start) :]
        self.tokens += len(delta.tokens)
        last = bool(delta.finish) or delta.failure is not None
        if delta.text or delta.tokens or last:
            self._deltas.append(delta)
            self._arrived.set()
        self.over = last

    def fail(self, failure: Failure) -> None:
        """Ends the exchange from this side."""
        if not self.over:
            self.over = True
            self._deltas.append(TextDelta(self.id, self.characters, "", failure=failure))
            self._arrived.set()

    async def next(self) -> TextDelta:
        """The next delta; those that wait are merged into one, so that a slow client holds one at most.

        Raises:
            RequestError: the request failed.
        """
        while not self._deltas:
            self._arrived.clear()
            await self._arrived.wait()
        delta = self._deltas.popleft()
        while self._deltas and delta.failure is None and self._deltas[0].failure is None:
            later = self._deltas.popleft()
            delta.text += later.text
            delta.tokens = delta.tokens + later.tokens
            delta.finish, delta.usage, delta.timing = later.finish, later.usage, later.timing
        if delta.failure is not None:
            raise RequestError(delta.failure)
        return delta
