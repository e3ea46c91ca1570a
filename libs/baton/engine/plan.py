"""What the engine tells a runner to compute in one step, and what it hears back.

A plan stays valid until its commit: the engine changes none of its lists meanwhile, so they are passed
by reference and a runner must not change them either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.engine.masks import Allowed
from baton.engine.penalties import Seen
from baton.protocol.sampling import SamplingParams, TokenLogprobs

Key = tuple[str, int, int]  # request, attempt, choice

FAILED = -1  # `Sampled.token` of a sequence whose logits were not finite


@dataclass(slots=True)
class SampleSpec:
    """How to choose the token at one output position."""

    params: SamplingParams
    choice: int
    index: int  # output index of the token to choose
    tokens: Sequence[int]  # all known tokens, prompt then output
    prompt_len: int
    seen: Seen | None = None  # counts for the penalties; None: counted from `tokens` when needed
    allowed: Allowed | None = None  # which ids a grammar allows; None: all

    @property
    def prompt(self) -> Sequence[int]:
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.prompt_len :]


@dataclass(slots=True)
class Score:
    """Prompt tokens of a slice whose log-probabilities are wanted."""

    first: int  # the slice's first row that counts
    targets: Sequence[int]  # what the prompt has after that row, and after each following one
    count: int  # how many of the most likely ids are wanted beside


@dataclass(slots=True)
class Scores:
    """Log-probabilities of a `Score`'s n targets and of the k = `count` most likely ids in their place."""

    chosen: npt.NDArray[np.float32]  # [n]
    top_ids: npt.NDArray[np.uint32]  # [n, k]
    top: npt.NDArray[np.float32]  # [n, k], falling


@dataclass(slots=True)
class Slice:
    """A run of consecutive tokens of one sequence, to be computed in this step.

    Their K and V go to `blocks[position // block_size]`, at `position % block_size`. Every position
    before `start` is written already.
    """

    key: Key
    tokens: list[int]  # at least one
    start: int  # absolute position of tokens[0]
    blocks: list[int]  # pool slots, in order; cover at least positions [0, start + len(tokens))
    sample: SampleSpec | None  # None: the logits of the last token are not needed
    score: Score | None = None  # the rows whose logits are needed beside it


@dataclass(slots=True)
class StepPlan:
    """One step: every slice, decodes and prompt chunks alike, each sequence at most once."""

    number: int  # counts from 1
    slices: list[Slice]

    @property
    def num_tokens(self) -> int:
        return sum(len(part.tokens) for part in self.slices)


@dataclass(slots=True)
class Sampled:
    """The token chosen from a slice's last logits; `FAILED` when those were not finite."""

    token: int
    logprobs: TokenLogprobs | None = None
    complete: bool = False  # nothing may follow: the grammar is satisfied and cannot go on
    problem: str = ""  # why it FAILED, if not for its logits


@dataclass(slots=True)
class StepResult:
    """What a runner answers: one entry a slice, None where the slice has no `sample`."""

    samples: list[Sampled | None]
    scores: dict[int, Scores] = field(default_factory=dict)  # by the slice's number, where it has a `score`
