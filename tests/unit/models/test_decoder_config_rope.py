"""RoPE: every kind of scaling against transformers, and GGUF's way of saying the same."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf_builder as build
import numpy as np
import pytest
from gguf_builder import Tensor, tiny_llama
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.models.config import DecoderConfig, from_gguf, from_hf, inverse_frequencies
from baton.models.gguf import GgufFile

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8_192,
    },
    "llama3 of another size": {
        "rope_type": "llama3",
        "factor": 32,
        "low_freq_factor": 2,
        "high_freq_factor": 5,
        "original_max_position_embeddings": 4_096,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    "yarn without its context": {"rope_type": "yarn", "factor": 4.0},
    "yarn with borders": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn not truncated": {"rope_type": "yarn", "factor": 16.0, "truncate": False},
    "yarn with its own temperature": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9},
    "yarn with mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn with one mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
    "yarn shrinking": {"rope_type": "yarn", "factor": 1.0},
}


def llama(rope: dict[str, Any], **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": 500_000.0, **rope},
        **changes,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_those_of_transformers(kind: str, head_dim: int) -> None:
    made = llama(KINDS[kind], head_dim=head_dim)
    compute = ROPE_INIT_FUNCTIONS.get(
        made.rope_parameters["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    expected, expected_factor = compute(made)
    config = from_hf(json.loads(made.to_json_string()), "here")
    ours, factor = inverse_frequencies(config.rope)
    assert (ours.dtype, ours.shape) == (np.float64, (head_dim // 2,))
    np.testing.assert_allclose(ours, expected.double().numpy(), rtol=2e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_way_of_writing_it_means_the_same(kind: str) -> None:
    raw = json.loads(llama(KINDS[kind]).to_json_string())
    section = raw.pop("rope_parameters")
    old = {key: value for key, value in section.items() if key not in ("rope_theta", "rope_type")}
    old["type"] = section["rope_type"]
    scaling = None if section["rope_type"] == "default" else old
    before = from_hf(raw | {"rope_theta": 500_000.0, "rope_scaling": scaling}, "here")
    after = from_hf(raw | {"rope_parameters": section}, "here")
    assert before.rope == after.rope


def test_a_context_beside_the_section_wins_as_in_transformers() -> None:
    raw = json.loads(llama(KINDS["yarn"]).to_json_string()) | {"original_max_position_embeddings": 1_024}
    taken = LlamaConfig(**raw)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](taken)
    config = from_hf(raw, "here")
    assert config.rope.original_context == 1_024
    np.testing.assert_allclose(inverse_frequencies(config.rope)[0], expected.double().numpy(), rtol=2e-6)


def test_yarn_without_a_factor_takes_it_from_the_contexts() -> None:
    section = {"rope_type": "yarn", "rope_theta": 500_000.0, "original_max_position_embeddings": 32_768}
    config = from_hf(json.loads(llama({}).to_json_string()) | {"rope_parameters": section}, "here")
    assert config.rope.factor == 4.0


def test_dynamic_scaling_ends_at_the_trained_context() -> None:
    """Beyond it the frequencies would depend on the length; up to there they are the plain ones."""
    dynamic = from_hf(json.loads(llama(KINDS["dynamic"]).to_json_string()), "here")
    plain = from_hf(json.loads(llama(KINDS["default"]).to_json_string()), "here")
    assert dynamic.max_context == 131_072
    np.testing.assert_array_equal(inverse_frequencies(dynamic.rope)[0], inverse_frequencies(plain.rope)[0])


# GGUF


def wide_llama(*extra: tuple[str, tuple[int, bytes]], factors: np.ndarray | None = None) -> build.Gguf:
    """The tiny Llama with heads of 64 dimensions, and more metadata."""
    made = tiny_llama()
    changes = {"llama.context_length": build.u32(131_072), "llama.attention.key_length": build.u32(64)}
    made.metadata = [item for item in made.metadata if item[0] not in changes]
    made.metadata += [*changes.items(), ("llama.attention.value_length", build.u32(64))]
    made.metadata += [("llama.rope.freq_base", build.f32(500_000.0)), *extra]
    shapes = {"attn_q": [4, 128], "attn_k": [4, 64], "attn_v": [4, 64], "attn_output": [128, 4]}
    for number, tensor in enumerate(made.tensors):
        shape = shapes.get(tensor.name.split(".")[-2])
        if shape is not None:
            made.tensors[number] = build.zeros(tensor.name, shape)
    if factors is not None:
        made.tensors.append(Tensor("rope_freqs.weight", [32], factors.astype("<f4").tobytes()))
    return made


def described(made: build.Gguf, tmp_path: Path) -> DecoderConfig:
    return from_gguf(GgufFile.open(made.write(tmp_path)))


def test_gguf_linear(tmp_path: Path) -> None:
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](llama(KINDS["linear"]))
    ways = (
        [("llama.rope.scaling.type", build.text("linear")), ("llama.rope.scaling.factor", build.f32(4))],
        [("llama.rope.scaling.factor", build.f32(4))],
        [("llama.rope.scale_linear", build.f32(4))],
    )
    for extra in ways:
        config = described(wide_llama(*extra), tmp_path)
        np.testing.assert_allclose(inverse_frequencies(config.rope)[0], expected.double().numpy(), rtol=2e-6)


def test_gguf_yarn(tmp_path: Path) -> None:
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](llama(KINDS["yarn"]))
    extra = [
        ("llama.rope.scaling.type", build.text("yarn")),
        ("llama.rope.scaling.factor", build.f32(4)),
        ("llama.rope.scaling.original_context_length", build.u32(32_768)),
    ]
    ours, our_factor = inverse_frequencies(described(wide_llama(*extra), tmp_path).rope)
    np.testing.assert_allclose(ours, expected.double().numpy(), rtol=2e-6)
    assert our_factor == pytest.approx(factor)
    extra.append(("llama.rope.scaling.attn_factor", build.f32(0.5)))
    assert inverse_frequencies(described(wide_llama(*extra), tmp_path).rope)[1] == pytest.approx(factor / 2)


def test_gguf_llama3_comes_as_a_divisor_for_each_frequency(tmp_path: Path) -> None:
    """As llama.cpp's converter computes them for Llama 3.1."""
    made = llama(KINDS["llama3"])
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](made)
    factors = []
    for exponent in range(0, 64, 2):
        frequency = 1.0 / 500_000.0 ** (exponent / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8_192 / 4:
            factors.append(1.0)
        elif wavelength > 8_192 / 1:
            factors.append(8.0)
        else:
            smooth = (8_192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    config = described(wide_llama(factors=np.array(factors)), tmp_path)
    ours, factor = inverse_frequencies(config.rope)
    np.testing.assert_allclose(ours, expected.double().numpy(), rtol=2e-6)
    assert (config.rope.kind, factor) == ("factors", 1.0)


def test_gguf_default_is_plain(tmp_path: Path) -> None:
    config = described(wide_llama(("llama.rope.scaling.type", build.text("none"))), tmp_path)
    assert (config.rope.kind, config.rope.theta, config.head_dim) == ("default", 500_000.0, 64)
    assert struct.unpack("<f", struct.pack("<f", 500_000.0))[0] == config.rope.theta
