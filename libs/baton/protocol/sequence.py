"""`SequenceState`: the only form in which a sequence moves (run, commit, drain, pre-emption, replay)."""

from __future__ import annotations

import msgspec

from baton.protocol.base import Part, Row, TokenIds, unpack_tokens
from baton.protocol.request import Timing
from baton.protocol.sampling import SamplingParams, TokenLogprobs


class Fork(Row):
    """A further choice of a sequence's prompt: it begins where that ends, and is then one of its own."""

    request: str
    attempt: int
    choice: int


class SequenceState(Part):
    """Everything that decides a sequence's next tokens, and where they go.

    `tokens` are all known tokens, prompt then output; the border is `prompt_len`: penalties, min and max
    tokens and usage depend on it. Randomness is a pure function of (seed, choice, output index), and
    penalties and stop state are recomputed from the tokens, so this is enough to go on anywhere.
    """

    request: str
    attempt: int
    tokens: bytes  # little-endian uint32, prompt + output
    prompt_len: int
    reply_to: str  # the owning tokenizer's subject for `TokenBatch`
    choice: int = 0
    computed: int = 0  # tokens whose KV is written; at most len(tokens) - 1 once one is sampled
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    logprobs: list[TokenLogprobs] = []  # of output tokens, when asked for
    priority: int = 0
    salt: str = ""  # adapter and `cache_salt`: salts the root of the block hashes
    deadline_ms: int = 600_000  # left from now
    cached_tokens: int = 0  # prompt tokens that prefill found in its cache
    delivered: int = 0  # output tokens that the owner has: sending goes on from there
    timing: Timing = msgspec.field(default_factory=Timing)

    def known(self) -> TokenIds:
        """All known tokens, uint32 [n]."""
        return unpack_tokens(self.tokens)
