"""The native runner on small random models: what a plain reference gives, and the same bits everywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import native_llama
import numpy as np
import pytest
import tiny_llama
from native_llama import equal_bits, logits_of, piece, prefill
from safetensors.torch import load_file, save_file

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import FAILED, SampleSpec, Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.errors import ModelError
from baton.protocol.sampling import SamplingParams
from baton.runner.native_runner import NativeRunner

# Heads shared by 1, 3 and 8; odd numbers of values everywhere but in a head.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-sharing": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 40},
    "wide-sharing": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
    "odd": {"hidden_size": 100, "intermediate_size": 171, "head_dim": 24, "tie_word_embeddings": True},
}
LENGTH = 300  # over two splits of keys


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("native")
    return {name: tiny_llama.save(root / name, **changes) for name, changes in SHAPES.items()}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["plain"]


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 515), k=length)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_references(folders: dict[str, Path], name: str) -> None:
    """Float32 against float64: a code on the other side of a tie here and there, and what follows from it."""
    tokens = tokens_of(9)
    expected = native_llama.reference(folders[name], tokens)
    made = native_llama.runner(folders[name])
    for length in (1, 2, 9):
        error = prefill(made, tokens[:length], [3]) - expected[length - 1]
        assert error.std() < 0.01 * expected[length - 1].std(), length


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_size", [8, 64])
def test_attention_reaches_over_splits_and_blocks(tmp_path: Path, name: str, block_size: int) -> None:
    """One layer: ties are not carried on, and a key too many or too few would show."""
    folder = tiny_llama.save(tmp_path / "flat", **{**SHAPES[name], "num_hidden_layers": 1})
    tokens = tokens_of(LENGTH)
    expected = native_llama.reference(folder, tokens)
    made = native_llama.runner(folder, block_size=block_size)
    for length in (127, 128, 129, LENGTH):
        error = prefill(made, tokens[:length], list(range(40))) - expected[length - 1]
        assert error.std() < 0.003 * expected[length - 1].std(), length


@pytest.mark.parametrize("name", SHAPES)
def test_same_bits_everywhere(folders: dict[str, Path], name: str) -> None:
    tokens = tokens_of(LENGTH)
    one = native_llama.runner(folders[name])
    two = native_llama.runner(folders[name], threads=2)
    blocks = list(range(20))
    expected = prefill(one, tokens, blocks)
    shuffled = random.Random(1).sample(range(20, 60), 20)
    assert equal_bits(prefill(one, tokens, shuffled), expected)
    for chunk in (1, 16, 33):
        assert equal_bits(prefill(two, tokens, blocks, chunk), expected), chunk
    assert equal_bits(one._pool.data[:18], two._pool.data[:18]) if one._pool and two._pool else False

    # Alone, then as one of many: decodes and chunks of other lengths beside it.
    others = [
        piece(tokens_of(length, length), 0, length, list(range(60 + 25 * i, 85 + 25 * i)), str(i))
        for i, length in enumerate((1, 2, 40, 129))
    ]
    logits_of(two, others)
    again = [
        piece([*tokens_of(length, length), 7], length, length + 1, list(range(60 + 25 * i, 85 + 25 * i)), "x")
        for i, length in enumerate((1, 2, 40, 129))
    ]
    mixed = logits_of(two, [again[0], piece(tokens, LENGTH - 1, LENGTH, blocks), *again[1:]])
    assert equal_bits(mixed[1], expected)
    chunked = logits_of(two, [again[3], piece(tokens, LENGTH - 7, LENGTH, blocks), again[1]])
    assert equal_bits(chunked[1], expected)
    assert equal_bits(chunked[0], mixed[4])


def test_portable_kernels_give_the_same_bits(folders: dict[str, Path]) -> None:
    for name in SHAPES:
        tokens, blocks = tokens_of(150), list(range(20))
        fast, plain = (
            native_llama.runner(folders[name], threads=2),
            native_llama.runner(folders[name], variant="portable"),
        )
        assert equal_bits(prefill(fast, tokens, blocks), prefill(plain, tokens, blocks, 64)), name
        assert fast._pool is not None and plain._pool is not None
        assert (fast._pool.data == plain._pool.data).all()


def greedy(tokens: list[int], start: int, blocks: list[int], **params: Any) -> Slice:
    spec = SampleSpec(SamplingParams(**params), 0, 0, tokens, len(tokens))
    return Slice(("a", 0, 0), tokens[start:], start, blocks, spec)


def test_step_samples_where_asked_in_the_plans_order(folder: Path) -> None:
    made = native_llama.runner(folder)
    tokens = list(range(10, 40))
    expected = int(prefill(made, tokens, [4, 5]).argmax())
    plan = StepPlan(
        1,
        [
            greedy(tokens, 0, [0, 1], logprobs=2),
            Slice(("b", 0, 0), tokens[:5], 0, [7], None),
            greedy(tokens[:1], 0, [2]),
        ],
    )
    first, none, last = made.execute(plan).samples
    assert none is None
    assert first is not None and last is not None
    assert first.token == expected
    assert first.logprobs is not None and first.logprobs.top_ids[0] == expected


def test_a_step_without_samples_writes_its_keys(folder: Path) -> None:
    made = native_llama.runner(folder)
    tokens = tokens_of(50)
    expected = prefill(made, tokens, list(range(5)))
    silent = StepPlan(1, [Slice(("a", 0, 0), tokens[:49], 0, list(range(10, 15)), None)])
    assert made.execute(silent).samples == [None]
    assert equal_bits(logits_of(made, [piece(tokens, 49, 50, list(range(10, 15)))])[0], expected)


def test_values_out_of_range_fail_their_sequence_only(tmp_path: Path) -> None:
    """Only token 77 has anything in the first dimension, where the last norm's weight is near the end."""
    source = tiny_llama.save(tmp_path / "wild")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][77, 0] = 50
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor[0] = 0
    tensors["model.norm.weight"][0] = 3e38
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    made = native_llama.runner(source)
    expected = prefill(made, [5, 6, 8], [1])
    assert np.isfinite(expected).all()
    plan = StepPlan(1, [greedy([5, 77], 0, [2]), greedy([5, 6, 8], 0, [3])])
    bad, good = made.execute(plan).samples
    assert bad is not None and good is not None
    assert (bad.token, good.token) == (FAILED, int(expected.argmax()))


def test_warm_up_leaves_the_pool_alone(folder: Path) -> None:
    made = native_llama.runner(folder, blocks=4)
    assert made._pool is not None
    made._pool.data[:] = 7
    made.warm_up()
    assert (made._pool.data == 7).all()


def test_use_out_of_order_is_told(folder: Path) -> None:
    settings = Settings(model=ModelSettings(name=str(folder)), worker=WorkerSettings(threads=1))
    made = NativeRunner(settings)
    plan = StepPlan(1, [greedy([5], 0, [0])])
    with pytest.raises(RuntimeError, match="attach"):
        made.execute(plan)
    other = native_llama.runner(folder, block_size=8)
    assert other._pool is not None
    with pytest.raises(ValueError, match="blocks of"):
        made.attach(other._pool)
    made.attach(KvPool.create_private(made.geometry, 2))
    for wrong in (greedy([515], 0, [0]), greedy([5], 0, [2]), greedy([-1], 0, [0])):
        with pytest.raises(ValueError, match="do not exist"):
            made.execute(StepPlan(1, [wrong]))
    with pytest.raises(ValueError, match="names 1 KV blocks"):
        made.execute(StepPlan(1, [greedy([5] * 17, 0, [0])]))
    made.close()
    made.close()
    with pytest.raises(RuntimeError):
        made.execute(plan)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"max_context": 4_096}, "--model-max-context 4096: .* at most 2048"),
        ({"name": "nothing-here"}, "nothing-here"),
        ({"name": "mock"}, "--engine mock"),
        ({"dtype": "float32"}, "--model-dtype float32"),
        ({"kv_dtype": "float32"}, "--model-kv-dtype float32"),
    ],
)
def test_settings_that_cannot_be_met(folder: Path, model: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelError, ValueError), match=words):
        NativeRunner(Settings(model=ModelSettings(**{"name": str(folder), **model})))


def test_heads_without_a_form_are_refused(tmp_path: Path) -> None:
    odd = tiny_llama.save(tmp_path / "odd", head_dim=12)
    with pytest.raises(ModelError, match="--engine torch"):
        native_llama.runner(odd)


def test_damaged_weights_are_told(tmp_path: Path) -> None:
    for number, (name, value) in enumerate({"mlp.up_proj": float("nan"), "mlp.down_proj": 1e9}.items()):
        source = tiny_llama.save(tmp_path / str(number))
        tensors = load_file(source / "model.safetensors")
        tensors[f"model.layers.1.{name}.weight"][3, 4] = value
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"layers.1.{name}.weight"):
            native_llama.runner(source)
