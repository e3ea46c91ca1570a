"""What an engine refuses to take, and in which words."""

from __future__ import annotations

from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.sampling import finish_reason
from baton.engine.sequence import Sequence
from baton.protocol.errors import Code, RequestError


def check_new(seq: Sequence, config: EngineConfig) -> None:
    """Check a sequence from outside, and fix the length at which it ends.

    Raises:
        RequestError: INVALID_REQUEST or CONTEXT_LENGTH.
    """
    if not 0 < seq.prompt_len <= len(seq.tokens):
        raise RequestError.of(
            Code.INVALID_REQUEST, f"{len(seq.tokens)} tokens with a prompt of {seq.prompt_len}"
        )
    if seq.prompt_len >= config.max_context:
        raise RequestError.of(
            Code.CONTEXT_LENGTH,
            f"the model takes {config.max_context} tokens of prompt and answer together, "
            f"and the prompt alone has {seq.prompt_len}: shorten it",
        )
    if config.vocab_size:
        params = seq.sampling
        highest = max(max(seq.tokens), *params.logit_bias, *params.stop_token_ids, 0)
        lowest = min(min(seq.tokens), *params.logit_bias, *params.stop_token_ids, 0)
        if lowest < 0 or highest >= config.vocab_size:
            wrong = highest if highest >= config.vocab_size else lowest
            raise RequestError.of(
                Code.INVALID_REQUEST, f"token id {wrong} is not one of the model's {config.vocab_size}"
            )
    seq.max_len = min(seq.prompt_len + seq.sampling.max_tokens, config.max_context)
    if finish_reason(seq) or len(seq.tokens) >= seq.max_len:
        raise RequestError.of(
            Code.INVALID_REQUEST,
            f"nothing is left to generate: {len(seq.tokens)} tokens, of at most {seq.max_len}",
        )


def check_fits(tokens: int, pool: BlockPool) -> None:
    """Check that K and V of so many tokens fit in the pool, were it empty.

    Raises:
        RequestError: CONTEXT_LENGTH.
    """
    room = pool.num_blocks * pool.block_size
    if tokens > room:
        raise RequestError.of(
            Code.CONTEXT_LENGTH,
            f"the KV cache of this worker holds {room} tokens, and the request may take {tokens} "
            "(prompt and max_tokens): ask for fewer, or raise --worker-kv-memory-mb",
        )
