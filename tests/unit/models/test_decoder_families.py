"""Small random Llamas of every shape that matters give transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "sharded": {"shard": "100KB"},
    "one KV head": {"num_key_value_heads": 1},
    "no shared heads": {"num_key_value_heads": 6},
    "wide heads": {"head_dim": 40},
    **{f"{name} rope": {"rope_parameters": {"rope_theta": 5_000.0, **rope}} for name, rope in ROPES.items()},
}
LENGTH = 150


def save(folder: Path, *, shard: str = "5GB", **changes: Any) -> Path:
    """A random model, saved by transformers itself."""
    generator = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**tiny_llama.SIZES, **changes}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(tiny_llama.random_weight(tuple(weight.shape), generator))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def theirs(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def some_tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_llama.SIZES["vocab_size"], (length,), generator=generator).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", **CASES[case])
    if case == "sharded":
        assert len(list(folder.glob("*.safetensors"))) > 2
    tokens = some_tokens(LENGTH)
    expected = theirs(folder, tokens)
    made = tiny_llama.runner(folder, dtype="float32", blocks=16)
    blocks = list(range(12))
    for end in (1, 17, 100, LENGTH):  # as prefix hits: each goes on from the one before
        start = {1: 0, 17: 1, 100: 17, LENGTH: 100}[end]
        got = tiny_llama.logits_of(made, [tiny_llama.piece(tokens, start, end, blocks)])[0]
        torch.testing.assert_close(got, expected[end - 1], atol=1e-4, rtol=0)


def test_float16_weights_are_close(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    tokens = some_tokens(LENGTH)
    made = tiny_llama.runner(folder, blocks=16)
    got = tiny_llama.prefill(made, tokens, list(range(12)))
    torch.testing.assert_close(got, theirs(folder, tokens)[-1], atol=0.05, rtol=0)


def test_padded_vocabulary_is_never_sampled(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    vocabulary = {f"t{number}": number for number in range(500)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []})
    )
    made = tiny_llama.runner(folder, dtype="float32", blocks=16)
    assert made.model.vocab_size == 500
    got = tiny_llama.prefill(made, some_tokens(20), list(range(12)))
    assert torch.isneginf(got[500:]).all()
    assert torch.isfinite(got[:500]).all()
