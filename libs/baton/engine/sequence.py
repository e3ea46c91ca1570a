"""One sequence: the single truth about its tokens, its blocks and where it stands.

                add                    admit (hand-off received)
                 |                               |
                 v          scheduled            v
              WAITING ---------------------> RUNNING ----------------------> FINISHED
                 ^                            |   |     last token, failure     ^  ^
                 |          pre-empted        |   |                             |  |
                 +----------------------------+   | first token, prefill only   |  |
                 |                                v                             |  |
                 |                              HELD ---------------------------+  |
                 |                                     released, aborted           |
                 +-----------------------------------------------------------------+
                                            aborted (from RUNNING too)

There are no phases. A running sequence has `computed` tokens, whose K and V are in `blocks`, and knows
`len(tokens)`; a step computes some or all of the difference, and whoever has nothing left to compute gets
one more token. Reading a prompt, going on after a prefix hit, recomputing after pre-emption and decoding
(one token missing) differ only in how much that is.

    tokens    [ prompt ............................ | output ..... ]
              0              computed             prompt_len      known
    blocks    [ slot ][ slot ][ slot ][ slot ]                       the last one is private to the sequence
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from baton.engine.penalties import Seen, penalised
from baton.engine.plan import Key, SampleSpec, Score
from baton.protocol.base import pack_tokens
from baton.protocol.request import Timing
from baton.protocol.sampling import SamplingParams, TokenLogprobs
from baton.protocol.sequence import Fork, SequenceState


class Status(enum.Enum):
    WAITING = "waiting"  # holds no blocks; goes on from its tokens and whatever is still cached
    RUNNING = "running"  # holds blocks for all known tokens
    HELD = "held"  # prefill done, blocks kept until the receiver has them
    FINISHED = "finished"  # holds nothing, or nothing after the step under way


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence in an engine. Times are the caller's clock, in seconds."""

    request: str
    attempt: int
    tokens: list[int]  # all known, prompt then output; grows at commit
    prompt_len: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0
    priority: int = 0  # class: higher goes first
    salt: str = ""
    reply_to: str = ""
    prefill_only: bool = False  # hold after the first token instead of decoding
    arrived: float = 0.0
    deadline: float = float("inf")  # kept for the worker, which aborts
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of output tokens, when asked for
    cached_tokens: int = 0  # prompt tokens found in the cache when first admitted, here or at prefill
    timing: Timing = field(default_factory=Timing)

    forks: list[Fork] = field(default_factory=list)  # further choices, until its first token is known

    status: Status = Status.WAITING
    computed: int = 0  # tokens whose K and V are written
    blocks: list[int] = field(
        default_factory=list
    )  # pool slots in order; replaced, never cleared, when freed
    hashes: list[int] = field(default_factory=list)  # of the leading full blocks, as far as known
    root: int = 0  # parent of the first block's hash
    max_len: int = 0  # tokens at which it ends, set by the engine
    order: int = 0  # of arrival in this engine
    preemptions: int = 0
    scored: int = 0  # rows of the prompt whose log-probabilities are out, when asked for
    announced: int = 0  # leading full blocks already named in a `Progress`, at their present slots
    in_flight: bool = False  # in the step being executed: its blocks must stay until the commit
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    _seen: Seen | None = None

    @property
    def key(self) -> Key:
        return (self.request, self.attempt, self.choice)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Known tokens not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be made."""
        return self.sampling.prompt_logprobs >= 0 and self.scored < self.prompt_len - 1

    @property
    def readable(self) -> int:
        """Leading tokens that may come from a cache: what comes after must be computed, for its logits."""
        return self.scored if self.scoring else len(self.tokens) - 1

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def rank(self) -> tuple[int, int]:
        """Running order: the highest class first, in it the oldest. The greatest is pre-empted first."""
        return (-self.priority, self.order)

    @property
    def place_in_queue(self) -> tuple[int, int, int]:
        """Waiting order: by class; in it what was pre-empted, then what a worker lost, then what is new."""
        return (-self.priority, 0 if self.preemptions else 1 if self.attempt else 2, self.order)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take one more output token."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self._seen is not None:
            self._seen.add(token)

    def spec(self) -> SampleSpec:
        """How to choose the token after the last known one."""
        params = self.sampling
        if self._seen is None and penalised(params):
            self._seen = Seen(self.tokens, self.prompt_len)
        return SampleSpec(
            params, self.choice, len(self.tokens) - self.prompt_len, self.tokens, self.prompt_len, self._seen
        )

    def score(self, count: int) -> Score | None:
        """What is wanted of the prompt's rows among the next `count` to compute."""
        if not self.scoring:
            return None
        first, last = max(self.computed, self.scored), min(self.computed + count, self.prompt_len - 1)
        if first >= last:
            return None
        targets = self.tokens[first + 1 : last + 1]
        return Score(first - self.computed, targets, self.sampling.prompt_logprobs)

    @classmethod
    def from_state(cls, state: SequenceState, now: float, *, prefill_only: bool = False) -> Sequence:
        """A sequence as it came over the bus. Nothing is computed yet here: `computed` stays 0.

        Raises:
            msgspec.ValidationError: the token bytes are cut short.
        """
        return cls(
            request=state.request,
            attempt=state.attempt,
            tokens=state.known().tolist(),
            prompt_len=state.prompt_len,
            sampling=state.sampling,
            choice=state.choice,
            priority=state.priority,
            salt=state.salt,
            reply_to=state.reply_to,
            prefill_only=prefill_only,
            arrived=now,
            deadline=now + state.deadline_ms / 1e3,
            logprobs=list(state.logprobs),
            cached_tokens=state.cached_tokens,
            timing=state.timing,
        )

    def to_state(self, now: float) -> SequenceState:
        """Everything another engine needs to go on from here. The prompt's log-probabilities stay behind."""
        sampling = self.sampling
        if sampling.prompt_logprobs >= 0:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return SequenceState(
            request=self.request,
            attempt=self.attempt,
            tokens=pack_tokens(self.tokens),
            prompt_len=self.prompt_len,
            reply_to=self.reply_to,
            choice=self.choice,
            computed=self.computed,
            sampling=sampling,
            logprobs=list(self.logprobs),
            priority=self.priority,
            salt=self.salt,
            deadline_ms=max(0, int((self.deadline - now) * 1e3))
            if self.deadline != float("inf")
            else 600_000,
            cached_tokens=self.cached_tokens,
            timing=self.timing,
        )
