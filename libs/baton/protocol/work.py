"""Tokenizer <-> worker: run this, these are its tokens, stop. All on a worker's one ordered subject."""

from __future__ import annotations

from baton.protocol.base import Message, Row
from baton.protocol.errors import Failure
from baton.protocol.placing import Target
from baton.protocol.request import Timing
from baton.protocol.sampling import PromptRows, TokenLogprobs
from baton.protocol.sequence import Fork, SequenceState


class Run(Message):
    """Tokenizer -> worker (a call): take this sequence. Answered `Accepted` or `Rejected`.

    With `decode` set, hand over to that worker after the first token; without, decode here. `forks` are
    other requests, of the same owner, that differ in their choice alone: they go wherever this one goes until
    its first token is known, and each goes on by itself from there. Until then they end as it ends.
    """

    state: SequenceState
    decode: Target | None = None
    forks: list[Fork] = []


class Cancel(Message):
    """Free all that (request, attempt) and lower attempts hold; leaves a tombstone for 60 s. Idempotent."""

    request: str
    attempt: int
    reason: str = ""


class Resume(Message):
    """Tokenizer -> worker: send this request's tokens again from output index `start`."""

    request: str
    attempt: int
    start: int
    prompt_start: int = -1  # and its `PromptRows` from this position; -1: they are here, or not wanted


class Ended(Message):
    """Tokenizer -> worker: the last token has arrived; forget the stream."""

    request: str
    attempt: int


class Leaving(Message):
    """Worker -> tokenizer: draining; these (request, attempt) can be moved with a `Move`. Said again.

    Sent on the subject of `TokenBatch`. What is not moved ends here, or is replayed when the grace is over.
    """

    worker: str
    epoch: int
    requests: list[tuple[str, int]]


class Move(Message):
    """Tokenizer -> worker (a call): hand this sequence over to `target`, as attempt `successor`.

    Answered `Accepted` or `Rejected`. The worker goes on to the next step border; what it makes from here on
    is sent by the target, from output index `start`. If that fails, it is `successor` that has failed.
    """

    request: str
    attempt: int
    successor: int
    target: Target
    start: int


class Tokens(Row):
    """New tokens of one sequence. `total` is set on the last item only, with `finish` or `failure`."""

    request: str
    attempt: int
    start: int  # output index of the first token here
    tokens: bytes  # little-endian uint32
    finish: str = ""  # stop, length
    total: int = -1  # output tokens in all, once finished
    logprobs: list[TokenLogprobs] = []
    failure: Failure | None = None
    cached_tokens: int = 0
    timing: Timing | None = None
    prompt: PromptRows | None = None


class TokenBatch(Message):
    """Worker -> tokenizer: one message a step and tokenizer, with every sequence's new tokens."""

    worker: str
    epoch: int
    items: list[Tokens]


class Drain(Message):
    """To any service: stop taking work, end what runs, then exit. Answered `Accepted`."""

    grace_ms: int = 30_000
