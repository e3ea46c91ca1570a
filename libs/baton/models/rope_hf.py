"""RoPE as config.json has it: `rope_parameters` (transformers 5), before `rope_theta` and `rope_scaling`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.rope import Rope, yarn_attention_factor

Natural = Annotated[int, Meta(gt=0, le=1 << 40)]
Positive = Annotated[float, Meta(gt=0)]

# Each kind with the keys that mean something to it.
_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "truncate", "attention_factor", "mscale", "mscale_all_dim",
    ),
}  # fmt: skip
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


class _Section(msgspec.Struct, kw_only=True):
    """The keys of all kinds. None: not given."""

    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Natural | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: float | None = None  # 0 means the default, as in transformers
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


def rope_from_hf(
    raw: dict[str, Any],
    source: str,
    *,
    head_dim: int,
    theta: float | None,
    partial: float | None,
    context: int,
    original_context: int | None,
) -> Rope:
    """Read a RoPE section.

    Args:
        raw: `rope_scaling` or `rope_parameters`; empty: plain RoPE.
        source: the file, for errors.
        head_dim: dimensions of a head.
        theta: `rope_theta` beside the section, which counts if the section has none.
        partial: `partial_rotary_factor` beside the section, likewise.
        context: `max_position_embeddings`.
        original_context: `original_max_position_embeddings` beside the section; wins over the one inside.

    Raises:
        ModelFileError: a value is missing or of the wrong kind.
        UnsupportedModel: a kind or a key is not supported; it is named.
    """
    kind = raw.get("rope_type", raw.get("type", "default"))
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise UnsupportedModel(f"{source}: RoPE scaling {kind!r:.80} is not supported")
    for key, value in raw.items():
        if key not in (*_COMMON, *known) and value is not None:
            raise UnsupportedModel(f"{source}: RoPE parameter {key!r:.80} is not supported with {kind}")
    try:
        given = msgspec.convert(raw, _Section)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{source}: RoPE parameters: {error}") from error
    rotated = partial if given.partial_rotary_factor is None else given.partial_rotary_factor
    if rotated not in (None, 1):
        raise UnsupportedModel(f"{source}: partial_rotary_factor {rotated} is not supported")
    rope = Rope(dimensions=head_dim, theta=given.rope_theta or theta or 10_000.0)
    original = original_context or given.original_max_position_embeddings or context
    if kind == "yarn":
        return _yarn(rope, given, original, given.factor or context / original)
    if kind == "default":
        return rope
    if given.factor is None:
        raise ModelFileError(f"{source}: RoPE scaling {kind} lacks its factor")
    if kind == "dynamic":
        return msgspec.structs.replace(rope, kind="dynamic")  # the factor works only past the context
    if kind == "linear":
        return msgspec.structs.replace(rope, kind="linear", factor=given.factor)
    if given.low_freq_factor is None or given.high_freq_factor is None:
        raise ModelFileError(f"{source}: RoPE scaling llama3 lacks low_freq_factor or high_freq_factor")
    return msgspec.structs.replace(
        rope,
        kind="llama3",
        factor=given.factor,
        original_context=original,
        low_freq_factor=given.low_freq_factor,
        high_freq_factor=given.high_freq_factor,
    )


def _yarn(rope: Rope, given: _Section, original: int, factor: float) -> Rope:
    attention = given.attention_factor
    if attention is None:
        attention = yarn_attention_factor(factor)
        if given.mscale and given.mscale_all_dim:
            attention = yarn_attention_factor(factor, given.mscale)
            attention /= yarn_attention_factor(factor, given.mscale_all_dim)
    return msgspec.structs.replace(
        rope,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=given.beta_fast or 32.0,
        beta_slow=given.beta_slow or 1.0,
        truncate=given.truncate is not False,
        attention_factor=attention,
    )
