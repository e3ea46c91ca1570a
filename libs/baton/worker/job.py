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

    `sender` numbers output tokens from the first one made here; earlier ones were sent by a former attempt.
    """

    sequence: Sequence
    sender: StreamSender
    known_at_start: int  # tokens known when it came here; what an offer covers
    target: Target | None = None  # hand over to, after the first token
    task: asyncio.Task[None] | None = None  # its hand-over, or its fetch from the KV store
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # new blocks, the first token, or over
    scheduled: bool = False
    held: bool = False  # first token known, waiting to be handed over
    admitted: float = 0.0  # when decoding began here
    over: bool = False

    @property
    def request(self) -> str:
        return self.sequence.request

    @property
    def attempt(self) -> int:
        return self.sequence.attempt

    @property
    def reply_to(self) -> str:
        return self.sequence.reply_to

    @property
    def timing(self) -> Timing:
        return self.sequence.timing
