"""What a decoder is made of, in numbers: the one description that every format is read into."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.rope import Rope, rope_problem

# Sizes past these are no model that this software could run; they keep products of them small.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden": 1 << 20,
    "layers": 4_096,
    "heads": 65_536,
    "kv_heads": 65_536,
    "head_dim": 4_096,
    "ffn": 1 << 22,
    "max_context": 1 << 31,
}


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: RMS norms before attention and before a gated feed-forward, RoPE, causal.

    Linear weights are [out, in]: q [heads * head_dim, hidden], k and v [kv_heads * head_dim, hidden],
    o [hidden, heads * head_dim], gate and up [ffn, hidden], down [hidden, ffn], embedding and head
    [vocab_size, hidden].
    """

    architecture: str  # as the model's file calls it
    vocab_size: int  # rows of the embedding and of the head
    real_vocab: int  # tokens that exist: ids from here to `vocab_size` are padding and never sampled
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms_eps: float
    rope: Rope
    max_context: int  # tokens of prompt and answer
    tied_embeddings: bool  # the head is the embedding
    attention_bias: bool = False  # q, k and v have biases
    qk_norm: bool = False  # q and k are normalised a head before RoPE
    activation: Literal["silu"] = "silu"
    qk_interleaved: bool = False  # the file has q and k rows in RoPE pairs (GGUF's llama): un-permute them
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


def checked(config: DecoderConfig, source: str) -> DecoderConfig:
    """The config itself, if its numbers fit each other.

    Raises:
        ModelFileError: they contradict each other or are absurd.
        UnsupportedModel: an odd head size.
    """
    for field, largest in _LARGEST.items():
        value = getattr(config, field)
        if not 1 <= value <= largest:
            raise ModelFileError(f"{source}: {field} is {value}, not 1 to {largest}")
    if config.heads % config.kv_heads:
        raise ModelFileError(f"{source}: {config.heads} heads cannot share {config.kv_heads} KV heads")
    if config.head_dim % 2:
        raise UnsupportedModel(f"{source}: heads of {config.head_dim} dimensions; RoPE needs an even number")
    if not 1 <= config.real_vocab <= config.vocab_size:
        raise ModelFileError(
            f"{source}: {config.real_vocab} tokens for an embedding of {config.vocab_size} rows"
        )
    if not 0 <= config.rms_eps < 1:
        raise ModelFileError(f"{source}: RMS epsilon is {config.rms_eps}")
    stops = config.eos_ids if config.bos_id is None else (*config.eos_ids, config.bos_id)
    for token in stops:
        if not 0 <= token < config.vocab_size:
            raise ModelFileError(f"{source}: token id {token} lies outside the vocabulary")
    problem = rope_problem(config.rope)
    if problem:
        raise ModelFileError(f"{source}: {problem}")
    return config
