"""The GPU engine, interpreted: whole answers equal the torch engine's, with its pool's twin in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
import torch

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import SampleSpec, Score, Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.errors import ModelError
from baton.protocol.sampling import SamplingParams
from baton.runner.create import create
from baton.runner.torch_runner import TorchRunner
from baton.runner.triton_runner import TritonRunner

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
PROMPT = [(7 * n * n + 3) % 259 for n in range(21)]  # one block and a part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("triton") / "model", seed=3, **SMALL)


def made(
    kind: type[TritonRunner] | type[TorchRunner], folder: Path, dtype: str = "float32", **model: Any
) -> Any:
    settings = Settings(
        model=ModelSettings(name=str(folder), cache_dir=str(folder.parent), dtype=dtype, **model),
        worker=WorkerSettings(threads=1, max_batch_tokens=64, max_sequences=4),
    )
    runner = kind(settings)
    runner.attach(KvPool.create_private(runner.geometry, 24))
    return runner


def answer(
    runner: Any, prompt: list[int], count: int, blocks: list[int], chunk: int, **rules: Any
) -> list[int]:
    """`count` tokens after `prompt`, which is computed in chunks."""
    tokens = list(prompt)
    computed = 0
    while len(tokens) < len(prompt) + count:
        end = min(computed + chunk, len(tokens))
        last = end == len(tokens)
        spec = SampleSpec(SamplingParams(seed=5, **rules), 0, len(tokens) - len(prompt), tokens, len(prompt))
        part = Slice(("a", 0, 0), tokens[computed:end], computed, blocks, spec if last else None)
        (sampled,) = runner.execute(StepPlan(1, [part])).samples
        computed = end
        if sampled is not None:
            tokens.append(sampled.token)
    return tokens[len(prompt) :]


def test_whole_answers_are_the_torch_engines(folder: Path) -> None:
    ours, theirs = made(TritonRunner, folder), made(TorchRunner, folder)
    for rules in ({}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}):
        expected = answer(theirs, PROMPT, 4, [3, 5], 64, **rules)
        assert answer(ours, PROMPT, 4, [3, 5], 13, **rules) == expected


def test_a_step_of_everything_has_the_torch_engines_logits(folder: Path) -> None:
    """Decodes beside chunks beside a scored prompt; and the same bits as each alone."""
    ours, theirs = made(TritonRunner, folder), made(TorchRunner, folder)
    first = [piece(PROMPT, 0, 3, [0]), piece(PROMPT, 0, 17, [2, 3])]
    second = [piece(PROMPT, 3, 4, [0]), piece(PROMPT, 17, 21, [2, 3]), piece(PROMPT[5:], 0, 1, [9])]
    for plan in (first, second):
        got, expected = (runner.logits(StepPlan(1, plan)) for runner in (ours, theirs))
        torch.testing.assert_close(got[:, :259], expected[:, :259], atol=2e-4, rtol=1e-4)
    alone = ours.logits(StepPlan(1, [piece(PROMPT, 20, 21, [2, 3])]))
    assert torch.equal(alone[0], got[1])


def got_of(runner: Any, plan: list[Slice]) -> torch.Tensor:
    logits: torch.Tensor = runner.logits(StepPlan(1, plan))
    return logits


def piece(tokens: list[int], start: int, end: int, blocks: list[int]) -> Slice:
    return Slice((f"{blocks}", 0, 0), tokens[start:end], start, blocks, None)


def test_scored_prompts(folder: Path) -> None:
    ours, theirs = made(TritonRunner, folder), made(TorchRunner, folder)
    spec = SampleSpec(SamplingParams(prompt_logprobs=2), 0, 0, PROMPT[:9], 9)
    part = Slice(("a", 0, 0), PROMPT[:9], 0, [0], spec, Score(0, PROMPT[1:9], 2))
    mine, yours = (runner.execute(StepPlan(1, [part])) for runner in (ours, theirs))
    np.testing.assert_allclose(mine.scores[0].chosen, yours.scores[0].chosen, atol=1e-4)
    assert (mine.scores[0].top_ids == yours.scores[0].top_ids).all()
    assert mine.samples[0].token == yours.samples[0].token


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "close"),
    [
        ("float16", "auto", 0.03),
        ("bfloat16", "fp8", 0.5),
        ("int8", "int8", 0.35),
        ("fp8", "auto", 0.7),
        ("int4", "auto", 0.9),
    ],
)
def test_formats(folder: Path, dtype: str, kv_dtype: str, close: float) -> None:
    """Logits lie about as far from float32's as the format is coarse."""
    runner = made(TritonRunner, folder, dtype, kv_dtype=kv_dtype)
    got = got_of(runner, [piece(PROMPT[:5], 0, 5, [0])])
    exact = got_of(made(TorchRunner, folder), [piece(PROMPT[:5], 0, 5, [0])])
    assert 0 < float((got - exact).norm() / exact.norm()) < close


def test_blocks_move_between_workers(folder: Path) -> None:
    """What a peer reads from one pool and another worker finds in its own gives the same bits."""
    source, target = made(TritonRunner, folder, kv_dtype="int8"), made(TritonRunner, folder, kv_dtype="int8")
    pools = [runner._mirror._pool for runner in (source, target)]
    expected = answer(source, PROMPT, 3, [0, 1], 64)
    for slot, to in ((0, 7), (1, 8)):
        pools[1].generations[to] += 1
        pools[1].data[to] = np.frombuffer(pools[0].view(slot), dtype=np.uint8)
    assert not (pools[0].data[:2] == 0).all(axis=1).any()
    tokens = [*PROMPT, *expected[:1]]
    got = []
    for number in range(2):
        spec = SampleSpec(SamplingParams(seed=5), 0, 1 + number, tokens, len(PROMPT))
        part = Slice(("b", 0, 0), tokens[-1:], len(tokens) - 1, [7, 8], spec)
        (sampled,) = target.execute(StepPlan(1, [part])).samples
        tokens.append(sampled.token)
        got.append(sampled.token)
    assert got == expected[1:]


@pytest.mark.slow
def test_a_slot_with_a_new_owner_is_not_taken_for_the_old(folder: Path) -> None:
    runner = made(TritonRunner, folder)
    pool = runner._mirror._pool
    answer(runner, PROMPT[:16], 1, [4], 16)
    fresh = np.full_like(pool.data[4], 1)
    pool.generations[4] += 1
    pool.data[4] = fresh
    assert (np.frombuffer(pool.view(4), dtype=np.uint8) == fresh).all()
    runner.logits(StepPlan(1, [piece([*PROMPT[:16], 9], 16, 17, [4, 5])]))
    assert (runner._mirror.pages.raw[4].cpu().numpy() == fresh).all()


@pytest.mark.slow
def test_warm_up_leaves_the_pool_alone(folder: Path) -> None:
    runner = made(TritonRunner, folder)
    runner.warm_up()
    assert not runner._mirror.pages.raw.any()
    assert not runner._mirror._pool.data.any()


@pytest.mark.slow
def test_a_larger_step_than_expected_gets_room(folder: Path) -> None:
    runner = made(TritonRunner, folder)
    long = [n % 250 for n in range(66)]
    got = got_of(runner, [piece(long, 0, 66, list(range(5)))])
    expected = got_of(made(TorchRunner, folder), [piece(long, 0, 66, list(range(5)))])
    torch.testing.assert_close(got, expected, atol=5e-4, rtol=1e-3)


def test_use_out_of_order_is_told(folder: Path) -> None:
    runner = made(TritonRunner, folder)
    with pytest.raises(ValueError, match="blocks of"):
        runner.attach(KvPool.create_private(made(TorchRunner, folder, block_size=8).geometry, 1))
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.execute(StepPlan(1, [piece(PROMPT, 0, 1, [0])]))


def test_fingerprint_follows_what_changes_blocks(folder: Path) -> None:
    runners = [
        made(TritonRunner, folder),
        made(TritonRunner, folder, kv_dtype="int8"),
        made(TritonRunner, folder, "bfloat16"),
        made(TritonRunner, folder, "int8"),
        made(TorchRunner, folder),
    ]
    assert len({runner.fingerprint for runner in runners}) == len(runners)
    assert made(TritonRunner, folder).fingerprint == runners[0].fingerprint


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"kv_dtype": "float16"}, "--model-kv-dtype float16: .* float32, or int8 or fp8"),
        ({"max_context": 4_096}, "--model-max-context 4096: .* at most 256"),
    ],
)
def test_settings_that_cannot_be_met(folder: Path, model: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, ModelError), match=words):
        made(TritonRunner, folder, **model)


def test_the_engine_is_chosen_by_name(folder: Path) -> None:
    settings = Settings(
        model=ModelSettings(name=str(folder), cache_dir=str(folder.parent), dtype="float32"),
        worker=WorkerSettings(engine="triton"),
    )
    assert isinstance(create(settings).inner, TritonRunner)
