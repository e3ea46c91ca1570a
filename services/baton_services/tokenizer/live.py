"""A live request: all that its owner knows of it, and nothing that only a worker knows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from baton.bus.streams import News, StreamReceiver
from baton.protocol.base import pack_tokens
from baton.protocol.placing import Placement, Target
from baton.protocol.request import Generate, TextDelta, Timing, Usage
from baton.protocol.sampling import SamplingParams, TokenLogprobs
from baton.protocol.sequence import SequenceState
from baton.protocol.work import Tokens
from baton.text.reader import Reader
from baton_services.tokenizer.answer import Answer
from baton_services.tokenizer.prompt_scores import PromptScores

ATTEMPTS_EACH = 1_024  # more than any owner makes


@dataclass(slots=True)
class LiveRequest:
    """One request from `Generate` to its last `TextDelta`.

    `output` are the tokens received so far, in order, from whichever attempts produced them: a replay
    re-sends prompt and output, and goes on at index len(output).
    """

    generate: Generate
    deadline: float  # monotonic seconds
    answer: Answer
    reader: Reader | None = None  # of tool calls and reasoning, where there may be any
    stream: StreamReceiver = field(default_factory=StreamReceiver)
    arrived: float = field(default_factory=time.monotonic)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    attempt: int = field(init=False)  # the one under way, or before the first
    failures: int = 0  # attempts that failed of themselves; lost workers do not count
    losses: int = 0  # workers that it was on and that died, in a row
    losses_at_work: int = 0  # of those, the ones that were computing it
    lost_at: int = 0  # output tokens it had at the last of those
    setbacks: int = 0  # attempts that ended, whyever, since its last new token
    placement: Placement | None = None
    avoid: list[tuple[str, int]] = field(default_factory=list)
    heard: float = 0.0  # when its worker was last heard of it
    progressed: float = 0.0  # when it was placed, or got its last new token
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    timing: Timing = field(default_factory=Timing)
    holder: str = ""  # the worker whose tokens arrive; until then any leg may hold it
    first_token: float = 0.0
    last_token: float = 0.0
    scores: PromptScores | None = None  # of the prompt, when they are asked for
    riders: list[LiveRequest] = field(default_factory=list)  # its further choices, until it has been placed
    described: bool = False  # its tokens have been put before the answer's
    begun: bool = False  # the first text is out
    dispatching: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        # Workers may still hold what a former owner of this request began: our attempts come after its.
        self.attempt = self.generate.resend * ATTEMPTS_EACH - 1

    @property
    def id(self) -> str:
        return self.generate.request

    def remaining_ms(self, now: float) -> int:
        return max(0, int((self.deadline - now) * 1000))

    def legs(self) -> list[Target]:
        """The workers that this request's current attempt depends on."""
        if self.placement is None:
            return []
        legs = [leg for leg in (self.placement.prefill, self.placement.decode) if leg is not None]
        return [leg for leg in legs if leg.id == self.holder] or legs

    @property
    def at_work(self) -> Target | None:
        """The worker that computes it now, as far as is known: until tokens come, the one that reads it."""
        return next(iter(self.legs()), None)

    def begin_attempt(self) -> None:
        """Goes on with the next attempt, at the token after the last one received."""
        self.attempt += 1
        self.holder = ""
        self.stream.restart(self.attempt)

    def receive(self, item: Tokens) -> tuple[list[int], list[TokenLogprobs], str] | None:
        """New tokens, their logprobs and the finish reason; None if something before them is missing.

        Raises:
            MalformedMessage: the item contradicts itself or what came before.
        """
        news = self.stream.feed(item)
        if not isinstance(news, News):
            return None
        return news.tokens, news.logprobs, self.stream.finish

    def follow(self, leader: LiveRequest) -> None:
        """Takes over what a further choice has in common with the first, which is prepared."""
        self.prompt, self.sampling, self.scores = leader.prompt, leader.sampling, leader.scores
        self.timing = msgspec.structs.replace(leader.timing)

    def board(self) -> list[LiveRequest]:
        """The further choices that go along with this attempt: none once either has made a token."""
        riders = [] if self.output else [each for each in self.riders if not (each.over or each.output)]
        for rider in riders:
            rider.begin_attempt()
            rider.placement = self.placement
        return riders

    @property
    def unscored(self) -> int:
        """From where on log-probabilities of the prompt are missing; -1: none are, or are wanted."""
        return -1 if self.scores is None or self.scores.complete else self.scores.next

    @property
    def written(self) -> int:
        """Characters of the answer's text that are out."""
        return self.answer.sent if self.reader is None else self.reader.written

    @property
    def finish(self) -> str:
        """Why the answer is over: a call that ends it is a reason of its own, one cut short is not."""
        called = self.reader is not None and self.reader.called and self.answer.finish == "stop"
        return "tool_calls" if called else self.answer.finish

    def delta(self, tokens: list[int], logprobs: list[TokenLogprobs], finish: str) -> TextDelta:
        """What new tokens add to the answer, as its gateway gets it."""
        token_start, counted = self.answer.described, self.answer.completion_tokens
        text, described = self.answer.push(tokens, logprobs, finish)
        delta = TextDelta(self.id, self.written, text, tokens=described, token_start=token_start)
        if self.reader is None:
            delta.start -= len(text)
            return delta
        delta.reasoning_start, delta.calls_start = self.reader.reasoned, self.reader.called_so_far
        reasoned = self.reader.reasons
        parts = self.reader.push(text)
        if reasoned or self.reader.reasons:
            self.reasoning_tokens += self.answer.completion_tokens - counted
        if self.answer.finish:
            parts += self.reader.finish()
        delta.text, delta.reasoning, delta.calls = parts.text, parts.reasoning, parts.calls
        return delta

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=self.answer.completion_tokens,
            cached_tokens=min(self.cached_tokens, len(self.prompt)),
            reasoning_tokens=self.reasoning_tokens,
        )

    def state(self, reply_to: str, now: float) -> SequenceState:
        """The sequence as its next worker takes it up."""
        sampling = self.sampling
        if self.unscored < 0 and sampling.prompt_logprobs >= 0:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return SequenceState(
            request=self.id,
            attempt=self.attempt,
            tokens=pack_tokens(self.prompt + self.output),
            prompt_len=len(self.prompt),
            reply_to=reply_to,
            choice=self.generate.choice,
            sampling=sampling,
            logprobs=self.logprobs,
            priority=self.generate.priority,
            salt=self.generate.cache_salt,
            deadline_ms=self.remaining_ms(now),
            delivered=len(self.output),
            cached_tokens=self.cached_tokens,
            timing=self.timing,
        )
