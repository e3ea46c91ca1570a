"""Rotary position embedding: the frequencies of every scaling kind that is supported.

Sources: RoPE (arXiv 2104.09864), linear scaling and NTK (as in transformers), YaRN (arXiv 2309.00071), Llama
3.1's smoothing (transformers' `modeling_rope_utils`), per-frequency factors (GGUF's `rope_freqs.weight`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions are rotated. Fields past `kind` matter to the kinds named beside them.

    `dynamic` NTK changes all frequencies once a sequence outgrows the trained context, also those of keys
    that are cached already, which a shared KV cache cannot follow. Within the trained context it equals
    `default`, so such a model is served up to there and not beyond.
    """

    dimensions: int  # of a head, all of them rotated; even
    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0  # linear, llama3, yarn: how many times longer the context became
    original_context: int = 0  # llama3, yarn: tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations within the original context above which nothing changes
    beta_slow: float = 1.0  # yarn: rotations below which the position is interpolated
    truncate: bool = True  # yarn: the borders of the ramp are whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    factors: tuple[float, ...] = ()  # factors: a divisor for each frequency


def inverse_frequencies(rope: Rope) -> tuple[Doubles, float]:
    """The angle a position adds in each pair of dimensions.

    Returns:
        Radians a position, float64 [dimensions / 2], and what cos and sin are multiplied by.
    """
    exponents = np.arange(0, rope.dimensions, 2, dtype=np.float64) / rope.dimensions
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain), rope.attention_factor
    if rope.kind == "factors":
        return plain / np.asarray(rope.factors, dtype=np.float64), 1.0
    return plain, 1.0


def rope_problem(rope: Rope) -> str:
    """Why no frequencies follow from these numbers; empty if they do."""
    positive = {
        "rope_theta": rope.theta - 1,  # its logarithm is a divisor
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor - low_freq_factor": rope.high_freq_factor - rope.low_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
        "original_max_position_embeddings": rope.original_context if rope.kind in ("llama3", "yarn") else 1,
        "the least of the RoPE factors": min(rope.factors, default=1),
    }
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            return f"RoPE cannot be computed: {name} is too small or not finite"
    if rope.kind == "factors" and len(rope.factors) != rope.dimensions // 2:
        return f"RoPE has {len(rope.factors)} factors for {rope.dimensions // 2} frequencies"
    try:
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(inverse_frequencies(rope)[0]).all())
    except (ValueError, OverflowError, ZeroDivisionError):
        finite = False
    return "" if finite else "RoPE cannot be computed: its numbers are too large or too small"


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature, as a multiplier of cos and sin (section 3.4 of the paper)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: Rope, plain: Doubles) -> Doubles:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    return np.where(
        wavelengths > longest, plain / rope.factor, np.where(wavelengths < shortest, plain, blended)
    )


def _yarn(rope: Rope, plain: Doubles) -> Doubles:
    """Dimensions that turn often are kept, those that turn seldom interpolated, with a ramp between."""

    def border(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return rope.dimensions * math.log(turns) / (2 * math.log(rope.theta))

    low, high = border(rope.beta_fast), border(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dimensions - 1)
    width = high - low if high != low else 0.001  # as in transformers: a step instead of a ramp
    ramp = np.clip((np.arange(rope.dimensions // 2, dtype=np.float64) - low) / width, 0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
