"""What a step brought: the engine's news for the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from baton.engine.plan import Scores, Slice
from baton.engine.sequence import Sequence
from baton.protocol.errors import Failure
from baton.protocol.sampling import TokenLogprobs


@dataclass(slots=True)
class Forked:
    """A choice that begins. Block `copy[1]` must get the content of `copy[0]` before anything else happens;
    where there are several, in the order in which they are told."""

    seq: Sequence
    copy: tuple[int, int] | None = None
    failure: Failure | None = None  # it could not be taken


@dataclass(slots=True)
class Progress:
    """What one step brought one sequence."""

    seq: Sequence
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of new_tokens, when asked for
    new_full_blocks: range = range(0)  # indices now full and computed, hits included; again after pre-emption
    finish: str = ""  # stop, length
    failure: Failure | None = None
    scores: Scores | None = None  # of the prompt tokens from position `scored_from` on
    scored_from: int = 0
    forked: list[Forked] = field(default_factory=list)  # its further choices, which are on their own now
    first: bool = False  # new_tokens holds the first token sampled here

    def take_scores(self, part: Slice, scores: Scores | None) -> bool:
        """Book a slice's log-probabilities of its prompt; False if there are none that mean anything."""
        assert part.score is not None
        if scores is None or len(scores.chosen) != len(part.score.targets) or np.isnan(scores.chosen).any():
            return False
        row = part.start + part.score.first
        self.scores, self.scored_from = scores, row + 1
        self.seq.scored = row + len(scores.chosen)
        return True
