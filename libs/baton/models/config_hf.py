"""A decoder's description out of a Hugging Face model folder: config.json and what stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.models.description import DecoderConfig, checked
from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.hf_keys import INFORMATIVE, NEUTRAL
from baton.models.jsonfile import read_json
from baton.models.rope_hf import rope_from_hf

Positive = Annotated[int, Meta(gt=0, le=1 << 40)]


class _Config(msgspec.Struct, kw_only=True):
    """The keys of config.json that are understood, with the defaults of transformers' LlamaConfig."""

    model_type: str
    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Positive = 2_048
    original_max_position_embeddings: Positive | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


# Defaults that differ from LlamaConfig's in a family of the same structure.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4_096},
}


def from_hf(raw: dict[str, Any], source: str, *, real_vocab: int | None = None) -> DecoderConfig:
    """Describe the decoder of a config.json.

    Args:
        raw: the parsed file.
        source: its path, for errors.
        real_vocab: how many tokens the tokenizer has; None: as many as the embedding has rows.

    Raises:
        ModelFileError: a key is missing, of the wrong kind, or contradicts another.
        UnsupportedModel: a key asks for something that the decoder does not do; it is named.
    """
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise UnsupportedModel(
            f"{source}: model_type {raw.get('model_type')!r:.80} is not supported; {', '.join(_FAMILIES)} are"
        )
    _refuse_unknown(raw, source)
    try:
        given = msgspec.convert({**family, **raw}, _Config)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{source}: {error}") from error
    if given.hidden_act != "silu":
        raise UnsupportedModel(f"{source}: hidden_act {given.hidden_act!r:.80} is not supported; silu is")
    window = given.sliding_window
    if window is not None and window < given.max_position_embeddings:
        raise UnsupportedModel(f"{source}: sliding_window {window} is not supported")
    head_dim = given.head_dim or given.hidden_size // given.num_attention_heads
    eos = given.eos_token_id
    return checked(
        DecoderConfig(
            architecture=given.model_type,
            vocab_size=given.vocab_size,
            real_vocab=given.vocab_size if real_vocab is None else min(real_vocab, given.vocab_size),
            hidden=given.hidden_size,
            layers=given.num_hidden_layers,
            heads=given.num_attention_heads,
            kv_heads=given.num_key_value_heads or given.num_attention_heads,
            head_dim=head_dim,
            ffn=given.intermediate_size,
            rms_eps=given.rms_norm_eps,
            rope=rope_from_hf(
                given.rope_scaling or given.rope_parameters or {},
                source,
                head_dim=head_dim,
                theta=given.rope_theta,
                partial=given.partial_rotary_factor,
                context=given.max_position_embeddings,
                original_context=given.original_max_position_embeddings,
            ),
            max_context=given.max_position_embeddings,
            tied_embeddings=given.tie_word_embeddings,
            bos_id=given.bos_token_id,
            eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        ),
        source,
    )


def from_hf_folder(folder: Path) -> DecoderConfig:
    """Describe the decoder in a model folder: config.json, the end tokens of generation_config.json (which
    win, as in transformers), and the number of tokens in tokenizer.json.

    Raises:
        ModelFileError, UnsupportedModel: as `from_hf`, or config.json is missing or no JSON object.
    """
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    tokenizer = folder / "tokenizer.json"
    real_vocab = _count_tokens(tokenizer) if tokenizer.exists() else None
    return from_hf(raw, str(folder / "config.json"), real_vocab=real_vocab)


class _AddedToken(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    """What is needed of tokenizer.json to count tokens."""

    model: _Model
    added_tokens: list[_AddedToken] = []


def _count_tokens(path: Path) -> int:
    """One more than the highest token id."""
    try:
        found = msgspec.convert(read_json(path), _Tokenizer)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{path}: {error}") from error
    vocab = found.model.vocab
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return max(highest, max((token.id for token in found.added_tokens), default=-1)) + 1


def _refuse_unknown(raw: dict[str, Any], source: str) -> None:
    """Nothing that might change the result is passed over in silence."""
    for key, value in raw.items():
        if key in _Config.__struct_fields__ or key in INFORMATIVE or key.startswith("_"):
            continue
        if value is None or value is False or value in ("", [], {}) or value in NEUTRAL.get(key, ()):
            continue
        raise UnsupportedModel(
            f"{source}: {key!r:.80} = {value!r:.80} is not supported; if the key does not change what the"
            " model computes, remove it from the file"
        )
