"""The torch runner: what it says of itself, what it samples, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
import torch
from safetensors.torch import load_file, save_file

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import FAILED, SampleSpec, Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.errors import ModelError
from baton.protocol.sampling import SamplingParams
from baton.runner.create import create
from baton.runner.torch_runner import TorchRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("runner") / "model")


def settings_for(folder: Path, *, worker: dict[str, Any] | None = None, **model: Any) -> Settings:
    return Settings(
        model=ModelSettings(name=str(folder), **model),
        worker=WorkerSettings(engine="torch", threads=1, **(worker or {})),
    )


def greedy_slice(tokens: list[int], start: int, blocks: list[int], **params: Any) -> Slice:
    spec = SampleSpec(SamplingParams(**params), 0, 0, tokens, len(tokens))
    return Slice(("a", 0, 0), tokens[start:], start, blocks, spec)


def test_geometry_and_blocks(folder: Path) -> None:
    runner = create(settings_for(folder, worker={"kv_memory_mb": 3}))
    assert isinstance(runner.inner, TorchRunner)
    shape = runner.geometry
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.block_size) == (3, 2, 16, 16)
    assert shape.dtype == "float16"
    assert shape.block_bytes == 3 * 2 * 2 * 16 * 16 * 2
    assert runner.num_blocks == 3 * 2**20 // shape.block_bytes
    assert (runner.model.max_context, runner.model.vocab_size) == (2_048, 515)


def test_fingerprint_follows_what_changes_blocks(folder: Path, tmp_path: Path) -> None:
    other = tiny_llama.save(tmp_path / "other", seed=1)
    made = [
        TorchRunner(settings_for(folder)),
        TorchRunner(settings_for(folder, dtype="float32")),
        TorchRunner(settings_for(folder, kv_dtype="float32")),
        TorchRunner(settings_for(folder, block_size=32)),
        TorchRunner(settings_for(other)),
    ]
    assert len({runner.fingerprint for runner in made}) == len(made)
    assert TorchRunner(settings_for(folder, max_context=100)).fingerprint == made[0].fingerprint


def test_step_samples_where_asked_in_the_plans_order(folder: Path) -> None:
    runner = tiny_llama.runner(folder)
    tokens = list(range(10, 40))
    long, short = [0, 1], [2, 3]
    expected = int(tiny_llama.prefill(runner, tokens, [4, 5]).argmax())
    expected_short = int(tiny_llama.prefill(runner, tokens[:1], [6]).argmax())
    plan = StepPlan(
        1,
        [
            greedy_slice(tokens, 0, long, logprobs=2),
            Slice(("b", 0, 0), tokens[:5], 0, [7], None),
            greedy_slice(tokens[:1], 0, short),
        ],
    )
    first, none, last = runner.execute(plan).samples
    assert none is None
    assert first is not None and last is not None
    assert (first.token, last.token) == (expected, expected_short)
    assert first.logprobs is not None
    assert first.logprobs.top_ids[0] == expected
    assert first.logprobs.chosen == first.logprobs.top[0]


def test_logits_that_are_not_finite_fail_their_sequence_only(folder: Path) -> None:
    runner = tiny_llama.runner(folder)
    assert runner._decoder is not None
    runner._decoder._table[77] = float("nan")
    tokens = [5, 6, 8]
    expected = int(tiny_llama.prefill(runner, tokens, [1]).argmax())
    plan = StepPlan(1, [greedy_slice([5, 77], 0, [2]), greedy_slice(tokens, 0, [3])])
    bad, good = runner.execute(plan).samples
    assert bad is not None and good is not None
    assert (bad.token, good.token) == (FAILED, expected)


def test_warm_up_leaves_the_pool_alone(folder: Path) -> None:
    runner = TorchRunner(settings_for(folder))
    pool = KvPool.create_private(runner.geometry, 4)
    runner.attach(pool)
    pool.data[:] = 7
    runner.warm_up()
    assert (pool.data == 7).all()


def test_use_out_of_order_is_told(folder: Path) -> None:
    runner = TorchRunner(settings_for(folder))
    plan = StepPlan(1, [greedy_slice([5], 0, [0])])
    with pytest.raises(RuntimeError, match="attach"):
        runner.execute(plan)
    other = KvPool.create_private(TorchRunner(settings_for(folder, block_size=8)).geometry, 1)
    with pytest.raises(ValueError, match="blocks of"):
        runner.attach(other)
    runner.attach(KvPool.create_private(runner.geometry, 1))
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError):
        runner.execute(plan)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"max_context": 4_096}, "--model-max-context 4096: .* at most 2048"),
        ({"name": "nothing-here"}, "nothing-here"),
        ({"name": "mock"}, "--engine mock"),
    ],
)
def test_settings_that_cannot_be_met(folder: Path, model: dict[str, Any], words: str) -> None:
    settings = Settings(model=ModelSettings(**{"name": str(folder), **model}))
    with pytest.raises((ModelError, ValueError), match=words):
        TorchRunner(settings)


def damage(source: Path, target: Path, change: Any) -> Path:
    """A copy of a model with its tensors changed by `change(tensors)`."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def set_to(value: float) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.2.self_attn.v_proj.weight"), "lacks.*layers.2.self_attn.v_proj"),
        (lambda t: t.pop("lm_head.weight"), "lacks.*lm_head"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(95)}),
            r"model.norm.weight.*\[95\], not \[96\]",
        ),
        (set_to(float("nan")), "layers.1.mlp.up_proj.weight.*NaN or infinity"),
        (set_to(float("inf")), "layers.1.mlp.up_proj.weight.*NaN or infinity"),
        (set_to(1e5), "layer 1.*--dtype float32"),
    ],
)
def test_damaged_weights(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    broken = damage(folder, tmp_path / "broken", change)
    with pytest.raises(ModelError, match=words) as told:
        TorchRunner(settings_for(broken))
    assert "\n" not in str(told.value)


def test_truncated_file(folder: Path, tmp_path: Path) -> None:
    broken = damage(folder, tmp_path / "broken", lambda tensors: None)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        TorchRunner(settings_for(broken))


def test_config_that_contradicts_the_weights(folder: Path, tmp_path: Path) -> None:
    broken = damage(folder, tmp_path / "broken", lambda tensors: None)
    config = json.loads((broken / "config.json").read_text())
    config["intermediate_size"] = 161
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\[160, 96\], not \[161, 96\]"):
        TorchRunner(settings_for(broken))


def test_logits_stay_within_the_vocabulary(folder: Path) -> None:
    runner = tiny_llama.runner(folder)
    plan = StepPlan(1, [greedy_slice([5, 6], 0, [0], temperature=1.5, seed=seed) for seed in range(3)])
    assert all(s is not None and 0 <= s.token < 515 for s in runner.execute(plan).samples)
    assert np.isfinite(tiny_llama.prefill(runner, [5, 6], [1]).numpy()).all()
