"""What a step brought: the engine's news for the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.plan import Scores
from baton.engine.sequence import Sequence
from baton.protocol.errors import Failure
from baton.protocol.sampling import TokenLogprobs


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
    first: bool = False  # new_tokens holds the first token sampled here
