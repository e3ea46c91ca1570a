"""Both ends of an indexed token stream. Pure: what is sent and when is the owner's business.

Each item says where it starts; the last one says how many tokens there are in all. Whatever is lost, doubled
or out of order, the receiver takes each token once: it drops what it has, and asks for what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.bus.prompt_rows import cut, joined
from baton.protocol.base import pack_tokens, token_list
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.request import Timing
from baton.protocol.sampling import PromptRows, TokenLogprobs
from baton.protocol.work import Tokens


class StreamSender:
    """The output tokens of one (request, attempt), kept until `Ended` so that they can be sent again.

    `first` is the index of the first token made by this attempt; the receiver has those before it.
    """

    def __init__(self, request: str, attempt: int, *, first: int = 0) -> None:
        self.request = request
        self.attempt = attempt
        self.first = first
        self.finish_reason = ""
        self.failure: Failure | None = None
        self._timing: Timing | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # one a token, or none at all
        self._sent = first
        self._prompt: PromptRows | None = None  # all that were made of it

    @property
    def next_index(self) -> int:
        """The index that the next token will have; the total once finished."""
        return self.first + len(self._tokens)

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason) or self.failure is not None

    @property
    def sent(self) -> int:
        """How many tokens the receiver has been sent, or has already."""
        return self._sent

    def delivered(self, count: int) -> None:
        """The receiver has just the first `count` tokens: `fresh` starts after them."""
        self._sent = min(max(count, self.first), self.next_index)

    def append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Adds tokens, with one `TokenLogprobs` each or none.

        Raises:
            ValueError: the stream is finished, or some tokens have logprobs and others do not.
        """
        if self.finished:
            raise ValueError(f"stream of {self.request} is finished")
        if logprobs and len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} logprobs")
        if tokens and self._tokens and bool(logprobs) != bool(self._logprobs):
            raise ValueError("logprobs belong to every token of a stream or to none")
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)

    def finish(
        self, reason: str = "", *, failure: Failure | None = None, timing: Timing | None = None
    ) -> None:
        """Ends the stream: `reason` is stop or length; or it failed."""
        if not reason and failure is None:
            raise ValueError("a stream ends with a reason or a failure")
        self.finish_reason, self.failure, self._timing = reason, failure, timing

    def score(self, rows: PromptRows) -> Tokens:
        """Adds rows of the prompt, which follow on those before; the item that brings them."""
        before = self._prompt
        self._prompt = rows if before is None else joined(before, rows)
        return self._rows_item(rows)

    def scored_since(self, start: int) -> Tokens | None:
        """Every row of the prompt from position `start` on; None if there are none yet.

        What this attempt has not made, because a former one did, cannot be served: a failure.
        """
        rows = self._prompt
        if rows is None and not self.next_index:
            return None
        if rows is None or start < rows.start:
            words = f"this attempt holds no rows of the prompt from {start} on"
            return Tokens(
                self.request, self.attempt, 0, b"", failure=Failure(code=Code.STALE, message=words), total=0
            )
        return self._rows_item(cut(rows, start))

    def _rows_item(self, rows: PromptRows | None) -> Tokens:
        return Tokens(self.request, self.attempt, self._sent, b"", prompt=rows)

    def fresh(self) -> Tokens:
        """What was not sent yet; possibly empty."""
        return self.since(self._sent)

    def since(self, start: int) -> Tokens:
        """Everything from index `start`, and the end if it is known: the answer to `Resume`.

        A `start` before `first` cannot be served: that item is a failure.
        """
        if start < self.first:
            words = f"this attempt holds tokens from {self.first}, not from {start}"
            return Tokens(
                self.request, self.attempt, start, b"", failure=Failure(code=Code.STALE, message=words)
            )
        start = min(start, self.next_index)
        skip = start - self.first
        item = Tokens(
            self.request,
            self.attempt,
            start,
            pack_tokens(self._tokens[skip:]),
            logprobs=self._logprobs[skip:],
        )
        if self.finished:
            item.finish, item.failure, item.timing = self.finish_reason, self.failure, self._timing
            item.total = self.next_index
        self._sent = max(self._sent, self.next_index)
        return item


@dataclass(slots=True, frozen=True)
class News:
    """Tokens that follow on those taken before; possibly none (a duplicate, or the bare end)."""

    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Gap:
    """Something before this item is missing: ask for everything from `start`."""

    start: int


@dataclass(slots=True, frozen=True)
class Stale:
    """Of an attempt that is not ours: its sender is to be told to stop."""

    attempt: int


class StreamReceiver:
    """Takes the items of one request in whatever order they come; `next_index` tokens have been taken."""

    def __init__(self, attempt: int = 0, next_index: int = 0) -> None:
        self.attempt = attempt
        self.next_index = next_index
        self.total = -1  # tokens in all, once everything up to the end is here
        self.finish = ""
        self.failure: Failure | None = None
        self.timing: Timing | None = None

    @property
    def ended(self) -> bool:
        """Every token and the end are here."""
        return self.total >= 0

    def restart(self, attempt: int) -> None:
        """Goes on with another attempt, at the same index."""
        self.attempt = attempt
        self.total, self.finish, self.failure, self.timing = -1, "", None, None

    def feed(self, item: Tokens) -> News | Gap | Stale:
        """Takes one item.

        Raises:
            MalformedMessage: it contradicts itself or what came before.
        """
        if item.attempt != self.attempt:
            return Stale(item.attempt)
        try:
            tokens = token_list(item.tokens)
        except msgspec.ValidationError as error:
            raise MalformedMessage(str(error)) from error
        end = item.start + len(tokens)
        self._check(item, len(tokens), end)
        if item.start > self.next_index:
            return Gap(self.next_index)
        start, skip = self.next_index, self.next_index - item.start
        self.next_index = max(start, end)
        if item.total >= 0:
            self.total = item.total
            self.finish, self.failure, self.timing = item.finish, item.failure, item.timing
        return News(start, tokens[skip:], item.logprobs[skip:])

    def _check(self, item: Tokens, count: int, end: int) -> None:
        if item.start < 0:
            raise MalformedMessage(f"tokens start at {item.start}")
        if item.logprobs and len(item.logprobs) != count:
            raise MalformedMessage(f"{count} tokens with {len(item.logprobs)} logprobs")
        if item.total < 0 and (item.finish or item.failure is not None):
            raise MalformedMessage("an end without the total of tokens")
        if item.total >= 0 and item.total != end:
            raise MalformedMessage(f"a last item ends at {end}, its total says {item.total}")
        if item.total >= 0 and item.total < self.next_index:
            raise MalformedMessage(f"total {item.total}, but {self.next_index} tokens have come")
        if self.ended and end > self.total:
            raise MalformedMessage(f"token {end - 1} of a stream that ended with {self.total}")
