"""A job: one sequence in this worker, from `Run` or a commit until its last token is acknowledged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.bus.streams import StreamSender
from baton.engine.sequence import Sequence
from baton.protocol.placing import Target
from baton.protocol.request import Timing


@dataclass(slots=True, eq=False)
class Job:
    """What a worker knows of one sequence beside its engine state.

    A job with a `target` is handed over after the next token that it makes: a `Run` that names a decode
    worker from its start on, any other one from its `Move` on.
    """

    sequence: Sequence
    sender: StreamSender  # every output token, those of former attempts included
    known_at_start: int  # tokens known when it came, or when its move was ordered: what an offer covers
    target: Target | None = None
    successor: int = -1  # the attempt as which it moves; -1: it keeps its own
    task: asyncio.Task[None] | None = None  # its hand-over, or its fetch from the KV store
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # new blocks, held, or over
    scheduled: bool = False  # in a step at least once since it (re)entered the queue
    held: bool = False  # its next token is known, it waits to be handed over
    admitted: float = 0.0  # when decoding began here
    over: bool = False

    @property
    def request(self) -> str:
        return self.sequence.request

    @property
    def attempt(self) -> int:
        """The attempt for whose sake it lives: once it moves, the one as which it goes on."""
        return max(self.sequence.attempt, self.successor)

    @property
    def reply_to(self) -> str:
        return self.sequence.reply_to

    @property
    def timing(self) -> Timing:
        return self.sequence.timing

    @property
    def left(self) -> int:
        """Output tokens that it may still make."""
        return self.sequence.max_len - self.sequence.known

    def move(self, target: Target, successor: int, start: int) -> None:
        """Hand over to `target` at the next step border; its owner has the first `start` output tokens."""
        self.target, self.successor = target, successor
        self.sequence.prefill_only = True
        self.known_at_start = self.sequence.known
        self.sender.attempt = successor
        self.sender.delivered(start)
