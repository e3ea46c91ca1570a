"""One sequence's answer between its tokenizer and the HTTP handler that waits for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.protocol.errors import Failure
from baton.protocol.placing import Target
from baton.protocol.request import Generate, TextDelta
from baton_services.gateway import call_deltas

MAX_WAITING = 64  # deltas kept apart; more are merged into one


TOKEN_BYTES = 256  # of a token with its log-probability, as it is held and sent


def _size(delta: TextDelta) -> int:
    beside = 1 + len(delta.tokens[0].top) if delta.tokens else 0
    called = sum(len(call.arguments) for call in delta.calls)
    return len(delta.text) + len(delta.reasoning) + called + TOKEN_BYTES * beside * len(delta.tokens)


def _nobody() -> None:
    """Nobody waits yet."""


@dataclass(slots=True)
class Exchange:
    """A live sequence as its gateway sees it.

    Deltas of a second tokenizer (the first one died) begin again at character 0: what has been taken
    already is cut off, so the client sees a pause and the same text.
    """

    generate: Generate
    deadline: float  # monotonic seconds
    owner: Target | None = None
    heard: float = field(default_factory=time.monotonic)
    characters: int = 0  # taken so far
    tokens: int = 0  # logprob entries taken so far
    reasoned: int = 0  # characters of reasoning taken so far
    calls: list[int] = field(default_factory=list)  # characters of each tool call's arguments, as well
    over: bool = False  # the last delta has come, or the client has gone
    forks: list[Exchange] = field(default_factory=list)  # that are handed over with it
    gap: bool = False  # text is missing: the owner must begin again
    handing: bool = False  # an owner is being looked for
    wake: Callable[[], None] = _nobody  # called when there is something to take
    _waiting: deque[TextDelta] = field(default_factory=deque)

    @property
    def id(self) -> str:
        return self.generate.request

    @property
    def together(self) -> list[Exchange]:
        """It, and those that its owner takes along with it."""
        return [self, *self.forks]

    @property
    def written(self) -> int:
        """Characters of the answer so far."""
        return self.characters + self.reasoned + sum(self.calls)

    @property
    def held(self) -> int:
        """Bytes that wait, about."""
        return sum(_size(delta) for delta in self._waiting)

    def put(self, delta: TextDelta) -> None:
        """Takes a delta from the bus; drops what was taken before, notices what is missing."""
        if self.over:
            return
        self.heard = time.monotonic()
        last = bool(delta.finish) or delta.failure is not None
        if delta.failure is None and self._misses(delta):
            self.gap = True
            return
        seen = max(0, self.characters - delta.start)
        delta.text = delta.text[seen:]
        delta.start = self.characters
        self.characters += len(delta.text)
        delta.tokens = delta.tokens[max(0, self.tokens - delta.token_start) :]
        delta.token_start = self.tokens
        self.tokens += len(delta.tokens)
        delta.reasoning = delta.reasoning[max(0, self.reasoned - delta.reasoning_start) :]
        delta.reasoning_start = self.reasoned
        self.reasoned += len(delta.reasoning)
        delta.calls_start = len(self.calls) + sum(self.calls)
        delta.calls = call_deltas.fresh(delta.calls, self.calls)
        self.over = last
        if delta.text or delta.tokens or delta.reasoning or delta.calls or last:
            self._append(delta)

    def _misses(self, delta: TextDelta) -> bool:
        """Whether something before this delta is missing."""
        if delta.start > self.characters or delta.token_start > self.tokens:
            return True
        called = len(self.calls) + sum(self.calls)
        return delta.reasoning_start > self.reasoned or delta.calls_start > called

    def fail(self, failure: Failure) -> None:
        """Ends the exchange from this side."""
        if not self.over:
            self.over = True
            self._append(TextDelta(self.id, self.characters, "", failure=failure))

    def peek(self) -> TextDelta | None:
        """What waits, if it is a single delta."""
        return self._waiting[0] if len(self._waiting) == 1 else None

    def take(self) -> TextDelta | None:
        """All that waits, as one delta, so that a slow client holds one at most. A failure comes alone."""
        if not self._waiting:
            return None
        if len(self._waiting) > 1 and self._waiting[-1].failure is not None:
            failed = self._waiting.pop()
            self._merge()
            merged = self._waiting.popleft()
            self._waiting.append(failed)
            return merged
        self._merge()
        return self._waiting.popleft()

    def _append(self, delta: TextDelta) -> None:
        self._waiting.append(delta)
        if len(self._waiting) > MAX_WAITING and delta.failure is None:
            self._merge()
        self.wake()

    def _merge(self) -> None:
        if len(self._waiting) < 2:
            return
        first, last = self._waiting[0], self._waiting[-1]
        first.text = "".join(delta.text for delta in self._waiting)
        first.tokens = [token for delta in self._waiting for token in delta.tokens]
        first.reasoning = "".join(delta.reasoning for delta in self._waiting)
        first.calls = call_deltas.merged(delta.calls for delta in self._waiting)
        first.finish, first.stop, first.timing = last.finish, last.stop, last.timing
        first.usage = last.usage or first.usage
        self._waiting.clear()
        self._waiting.append(first)
