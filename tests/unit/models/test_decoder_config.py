"""A decoder's description from config.json and from GGUF: complete, or refused by the name of what is odd."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_builder as build
import numpy as np
import pytest
from gguf_builder import Gguf, tiny_llama, zeros
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig

from baton.models.config import DecoderConfig, Rope, from_gguf, from_hf, inverse_frequencies, load_config
from baton.models.errors import ModelError, ModelFileError, UnsupportedModel
from baton.models.gguf import GgufFile


def test_the_default_model(smollm2: Path) -> None:
    assert load_config(smollm2) == DecoderConfig(
        architecture="llama",
        vocab_size=49_152,
        real_vocab=49_152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1_536,
        rms_eps=1e-5,
        rope=Rope(dimensions=64, theta=100_000.0),
        max_context=8_192,
        tied_embeddings=True,
        qk_interleaved=True,
        bos_id=1,
        eos_ids=(2,),
    )


# config.json


def llama(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it, with keys changed afterwards."""
    made = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=[2, 3],
    )
    raw: dict[str, Any] = json.loads(made.to_json_string())
    return raw | changes


def test_a_llama_of_transformers() -> None:
    config = from_hf(llama(), "here", real_vocab=97)
    assert config == DecoderConfig(
        architecture="llama",
        vocab_size=100,
        real_vocab=97,
        hidden=64,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        rms_eps=1e-5,
        rope=Rope(dimensions=16, theta=10_000.0),
        max_context=512,
        tied_embeddings=False,
        bos_id=1,
        eos_ids=(2, 3),
    )


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    needed = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    raw = {key: value for key, value in llama().items() if key in (*needed, "num_attention_heads")}
    config, taken = from_hf(raw, "here"), LlamaConfig(**raw)
    assert config.kv_heads == taken.num_key_value_heads
    assert config.head_dim == taken.head_dim
    assert config.max_context == taken.max_position_embeddings
    assert config.rms_eps == taken.rms_norm_eps
    assert config.tied_embeddings == taken.tie_word_embeddings
    assert config.rope.theta == taken.rope_parameters["rope_theta"]
    assert config.real_vocab == config.vocab_size


def test_mistral_is_a_llama_without_its_window() -> None:
    raw = json.loads(
        MistralConfig(sliding_window=None, hidden_size=64, num_attention_heads=8).to_json_string()
    )
    config = from_hf(raw, "here")
    assert (config.architecture, config.heads, config.kv_heads) == ("mistral", 8, 8)
    del raw["sliding_window"]  # then transformers takes 4,096
    with pytest.raises(UnsupportedModel, match="sliding_window 4096"):
        from_hf(raw, "here")
    assert from_hf(raw | {"max_position_embeddings": 4_096}, "here").max_context == 4_096


def test_keys_that_change_nothing_are_passed_over() -> None:
    from_hf(
        llama(
            torch_dtype="bfloat16",
            use_cache=True,
            attention_bias=False,
            mlp_bias=False,
            quantization_config=None,
            rope_interleaved=False,
            is_llama_config=True,
            residual_multiplier=1.0,
            **{"transformers.js_config": {"dtype": "q4"}, "_name_or_path": "/data/model"},
        ),
        "here",
    )


HF_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
    ({"sliding_window": 128}, "sliding_window 128 is not supported"),
    ({"attention_bias": True}, "'attention_bias' = True"),
    ({"mlp_bias": True}, "'mlp_bias' = True"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' = 30.0"),
    ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
    ({"embedding_multiplier": 12.0}, "'embedding_multiplier' = 12.0"),
    ({"residual_multiplier": 0.22}, "'residual_multiplier'"),
    ({"attention_multiplier": 0.015}, "'attention_multiplier'"),
    ({"logits_scaling": 8.0}, "'logits_scaling'"),
    ({"scale_emb": 12, "scale_depth": 1.4}, "'scale_emb'"),
    ({"num_local_experts": 8}, "'num_local_experts'"),
    ({"layer_types": ["sliding_attention"]}, "'layer_types'"),
    ({"no_rope_layers": [1, 0]}, "'no_rope_layers'"),
    ({"rope_interleaved": True}, "'rope_interleaved'"),
    ({"something_new": 1}, "'something_new' = 1 is not supported; if the key"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor 0.25",
    ),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "RoPE scaling 'longrope'"),
    ({"rope_scaling": {"type": "su"}}, "RoPE scaling 'su'"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "RoPE scaling \\['yarn'\\]"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "'mrope_section'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
    ({"head_dim": 15}, "heads of 15 dimensions"),
]


@pytest.mark.parametrize(("changes", "message"), HF_REFUSED, ids=[str(case[0])[:50] for case in HF_REFUSED])
def test_what_would_change_the_result_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"here: .*{message}"):
        from_hf(llama(**changes), "here")


HF_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "layers is 1000000000"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
    ({"hidden_size": 10**30}, "hidden"),
    ({"rms_norm_eps": -1.0}, "RMS epsilon is -1.0"),
    ({"rms_norm_eps": float("nan")}, "RMS epsilon is nan"),
    ({"eos_token_id": 100}, "token id 100 lies outside"),
    ({"bos_token_id": -1}, "token id -1 lies outside"),
    ({"eos_token_id": ["2"]}, "eos_token_id"),
    ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, "linear lacks its factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"\$\.factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor is too small or not finite"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": -99.0, "mscale_all_dim": 1}},
        "attention",
    ),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
        "original",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor - low_freq_factor",
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "rope_theta is too small"),
]


@pytest.mark.parametrize(("changes", "message"), HF_WRONG, ids=[str(case[0])[:50] for case in HF_WRONG])
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=f"here: .*{message}"):
        from_hf(llama(**changes), "here")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = llama()
    del raw[key]
    with pytest.raises(ModelFileError, match=key):
        from_hf(raw, "here")


def test_a_folder_says_more_than_its_config(tmp_path: Path) -> None:
    """The end tokens of generation_config.json win, and tokenizer.json tells how many tokens are real."""
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    assert load_config(tmp_path).real_vocab == 100
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    tokenizer = {"model": {"vocab": {"a": 0, "b": 89}}, "added_tokens": [{"id": 94, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = load_config(tmp_path)
    assert (config.eos_ids, config.real_vocab) == ((7, 8), 95)
    unigram = {"model": {"vocab": [["a", -1.0]] * 50}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert load_config(tmp_path).real_vocab == 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.json: is empty"),
        (b"{", "config.json: "),
        (b"[]", "config.json: Expected `object`"),
        (b"\xff", "config.json: "),
        (b"[" * 100_000, "config.json: "),
        (None, "config.json: cannot be read"),
    ],
)
def test_a_damaged_config_is_told(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
ROPE_SECTION = st.dictionaries(
    st.sampled_from(
        [
            "factor",
            "rope_theta",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "low_freq_factor",
            "high_freq_factor",
            "truncate",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
        ]
    ),
    st.floats() | st.integers() | st.sampled_from([1e-320, 1e308, 10**400]) | ANYTHING,
    max_size=5,
)


@settings(max_examples=200, deadline=5_000)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(llama())), ANYTHING, max_size=2),
    kind=st.sampled_from(["linear", "yarn", "llama3", "dynamic", "default"]),
    section=ROPE_SECTION,
)
def test_any_config_is_read_or_refused(changes: dict[str, Any], kind: str, section: dict[str, Any]) -> None:
    try:
        config = from_hf(llama(rope_scaling={"rope_type": kind, **section}) | changes, "here")
    except ModelError as error:
        assert "\n" not in str(error)
        return
    frequencies, factor = inverse_frequencies(config.rope)
    assert np.isfinite(frequencies).all()
    assert math.isfinite(factor)


# GGUF


def described(made: Gguf, tmp_path: Path) -> DecoderConfig:
    return from_gguf(GgufFile.open(made.write(tmp_path)))


def changed(key: str, value: tuple[int, bytes] | None) -> Gguf:
    """The tiny Llama with one metadata key set or left out."""
    made = tiny_llama()
    made.metadata = [item for item in made.metadata if item[0] != key]
    if value is not None:
        made.metadata.append((key, value))
    return made


def with_tensor(name: str, shape: list[int]) -> Gguf:
    made = tiny_llama()
    made.tensors.append(zeros(name, shape))
    return made


def test_a_tiny_llama(tmp_path: Path) -> None:
    config = described(tiny_llama(), tmp_path)
    assert config == DecoderConfig(
        architecture="llama",
        vocab_size=8,
        real_vocab=8,
        hidden=4,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=2,
        ffn=6,
        rms_eps=1e-5,
        rope=Rope(dimensions=2, theta=10_000.0),
        max_context=64,
        tied_embeddings=True,
        qk_interleaved=True,
        bos_id=1,
        eos_ids=(2,),
    )
    assert not described(tiny_llama(tied=False), tmp_path).tied_embeddings


def test_padding_of_the_vocabulary_is_not_real(tmp_path: Path) -> None:
    """Rows past the last token, and tokens at the end that are marked as unused (type 5)."""
    assert described(changed("tokenizer.ggml.tokens", build.strings(list("abcde"))), tmp_path).real_vocab == 5
    assert described(changed("llama.vocab_size", build.u32(8)), tmp_path).real_vocab == 8
    unused = build.numbers([1, 5, 1, 1, 1, 5, 5, 5])
    assert described(changed("tokenizer.ggml.token_type", unused), tmp_path).real_vocab == 5
    assert described(changed("tokenizer.ggml.tokens", None), tmp_path).real_vocab == 8


def test_all_end_tokens_count_once(tmp_path: Path) -> None:
    made = changed("tokenizer.ggml.eot_token_id", build.u32(5))
    made.metadata.append(("tokenizer.ggml.eom_token_id", build.u32(2)))
    assert described(made, tmp_path).eos_ids == (2, 5)


def test_a_value_for_each_layer_may_be_given_if_they_agree(tmp_path: Path) -> None:
    alike = changed("llama.attention.head_count_kv", build.numbers([1, 1]))
    assert described(alike, tmp_path).kv_heads == 1
    with pytest.raises(UnsupportedModel, match=r"llama\.attention\.head_count_kv differs between layers"):
        described(changed("llama.attention.head_count_kv", build.numbers([1, 2])), tmp_path)


GGUF_REFUSED: dict[str, tuple[Callable[[], Gguf], str]] = {
    "another family": (lambda: changed("general.architecture", build.text("mamba")), "architecture 'mamba'"),
    "no family": (lambda: changed("general.architecture", None), "architecture None"),
    "experts": (lambda: changed("llama.expert_count", build.u32(8)), "'llama.expert_count'"),
    "window": (lambda: changed("llama.attention.sliding_window", build.u32(9)), "'llama.attention.sliding_"),
    "softcap": (lambda: changed("llama.final_logit_softcapping", build.f32(30)), "'llama.final_logit_soft"),
    "scale": (lambda: changed("llama.logit_scale", build.f32(0.5)), "'llama.logit_scale'"),
    "not causal": (
        lambda: changed("llama.attention.causal", (build.BOOL, b"\0")),
        "'llama.attention.causal'",
    ),
    "new key": (lambda: changed("llama.something.new", build.text("x")), "'llama.something.new'"),
    "partial rotary": (lambda: changed("llama.rope.dimension_count", build.u32(1)), "partial rotary"),
    "other values": (lambda: changed("llama.attention.value_length", build.u32(4)), "value_length differs"),
    "longrope": (lambda: changed("llama.rope.scaling.type", build.text("longrope")), "'longrope'"),
    "factor without yarn": (lambda: changed("llama.rope.scaling.attn_factor", build.f32(2)), "without YaRN"),
    "yarn extrapolation": (
        lambda: changed("llama.rope.scaling.yarn_ext_factor", build.f32(0.5)),
        "'llama.rope.scaling.yarn_ext_factor'",
    ),
    "split": (lambda: changed("split.count", (2, struct.pack("<H", 3))), "one part of a split model"),
    "biases": (lambda: with_tensor("blk.0.attn_q.bias", [4]), "tensor 'blk.0.attn_q.bias'"),
    "norms of q": (lambda: with_tensor("blk.0.attn_q_norm.weight", [2]), "'blk.0.attn_q_norm.weight'"),
    "long factors": (lambda: with_tensor("rope_factors_long.weight", [1]), "'rope_factors_long.weight'"),
    "a layer too many": (lambda: with_tensor("blk.1.attn_norm.weight", [4]), "'blk.1.attn_norm.weight'"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_gguf_what_would_change_the_result_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = GGUF_REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        described(make(), tmp_path)


def test_gguf_neutral_keys_are_passed_over(tmp_path: Path) -> None:
    made = changed("llama.expert_count", build.u32(0))
    made.metadata.append(("llama.attention.causal", (build.BOOL, b"\1")))
    made.metadata.append(("llama.rope.scaling.finetuned", (build.BOOL, b"\1")))
    made.metadata.append(("llama.tensor_data_layout", build.text("Meta AI original pth")))
    described(made, tmp_path)


def without_tensor() -> Gguf:
    made = tiny_llama()
    made.tensors = [tensor for tensor in made.tensors if tensor.name != "blk.0.ffn_up.weight"]
    return made


GGUF_WRONG: dict[str, tuple[Callable[[], Gguf], str]] = {
    "no hidden": (lambda: changed("llama.embedding_length", None), "lacks the metadata key llama.embedding_"),
    "hidden as text": (lambda: changed("llama.embedding_length", build.text("4")), "not a whole number"),
    "hidden of bool": (lambda: changed("llama.embedding_length", (build.BOOL, b"\1")), "not a whole number"),
    "no heads": (lambda: changed("llama.attention.head_count", build.u32(0)), "head"),
    "no layers": (lambda: changed("llama.block_count", build.u32(0)), "layers is 0"),
    "2^32 layers": (lambda: changed("llama.block_count", build.u32(2**32 - 1)), "layers is 4294967295"),
    "more layers": (lambda: changed("llama.block_count", build.u32(9)), "lacks tensors for its 9 layers"),
    "epsilon is NaN": (
        lambda: changed("llama.attention.layer_norm_rms_epsilon", build.f32(float("nan"))),
        "not a finite number",
    ),
    "theta is infinite": (lambda: changed("llama.rope.freq_base", build.f32(float("inf"))), "not a finite"),
    "theta is negative": (lambda: changed("llama.rope.freq_base", build.f32(-5)), "rope_theta"),
    "scaling type is a number": (lambda: changed("llama.rope.scaling.type", build.u32(1)), "not a string"),
    "another width": (lambda: changed("llama.embedding_length", build.u32(8)), "has shape"),
    "a tensor less": (without_tensor, "lacks t"),
    "vocabulary too large": (lambda: changed("llama.vocab_size", build.u32(9)), "the embedding has 8 rows"),
    "more tokens than rows": (
        lambda: changed("tokenizer.ggml.tokens", build.strings(list("abcdefghij"))),
        "10 tokens for an embedding of 8 rows",
    ),
    "end token outside": (lambda: changed("tokenizer.ggml.eos_token_id", build.u32(8)), "token id 8"),
    "no embedding": (lambda: Gguf(tiny_llama().metadata, []), "lacks the tensor 'token_embd.weight'"),
    "factors of zero": (lambda: with_tensor("rope_freqs.weight", [1]), "factors that are not positive"),
}


@pytest.mark.parametrize("case", GGUF_WRONG)
def test_gguf_what_makes_no_sense_is_refused(case: str, tmp_path: Path) -> None:
    make, message = GGUF_WRONG[case]
    with pytest.raises(ModelFileError, match=message):
        described(make(), tmp_path)
