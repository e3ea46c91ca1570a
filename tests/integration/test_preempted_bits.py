"""A sequence that is pre-empted and recomputed has the same logits, bit for bit, as one left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import native_llama
import numpy as np
import numpy.typing as npt
import pytest
import tiny_llama
import torch

from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.models.pull import pull
from baton.protocol.sampling import SamplingParams
from baton.runner.native_runner import NativeRunner
from baton.runner.torch_runner import TorchRunner
from baton.text.model_files import load_tokenizer

MODEL = "smollm2-135m-instruct"
LENGTHS = (60, 33, 47, 16)
OUTPUT = 20
AMPLE, SHORT = 64, 11  # blocks of 16 tokens; all sequences together need 16 in the end

Runner = NativeRunner | TorchRunner
Make = Callable[[int], Runner]  # of the number of blocks
Logits = dict[tuple[str, int], npt.NDArray[np.float32]]  # request, output index -> [vocab]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    story = (Path(__file__).parents[1] / "data" / "harbour.txt").read_text()
    text = load_tokenizer(pull(MODEL)).encode(story, special=False)
    return [text[100 * number : 100 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(params=["native", "torch"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """The real model on the native kernels, a small one on torch, which is slow."""
    if request.param == "native":
        return lambda blocks: native_llama.runner(MODEL, blocks=blocks)
    folder = tiny_llama.save(tmp_path, vocab_size=49_152)
    return lambda blocks: tiny_llama.runner(folder, blocks=blocks)


def generate(make: Make, prompts: list[list[int]], blocks: int) -> tuple[Logits, int]:
    """Every logit that a token was chosen from, and how often a sequence was pre-empted."""
    runner = make(blocks)
    pool = BlockPool(blocks, runner.geometry.block_size, [0] * blocks)
    engine = Engine(EngineConfig(runner.fingerprint, max_context=512, max_batch_tokens=48), pool)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=3, ignore_eos=True)
    found = [Sequence(str(at), 1, list(prompt), len(prompt), params) for at, prompt in enumerate(prompts)]
    for sequence in found:
        engine.add(sequence)
    logits: Logits = {}
    now = 0.0
    while engine.has_work:
        now += 1.0
        plan = engine.schedule(now)
        assert plan is not None
        rows = torch.as_tensor(runner.logits(plan)).clone().numpy()
        for part, row in zip(plan.slices, rows, strict=True):
            if part.sample is not None:
                logits[part.key[0], part.sample.index] = row
        engine.commit(plan, runner.execute(plan), now)
    runner.close()
    return logits, sum(sequence.preemptions for sequence in found)


def test_preempted_or_not(make: Make, prompts: list[list[int]]) -> None:
    expected, none = generate(make, prompts, AMPLE)
    found, preempted = generate(make, prompts, SHORT)
    assert (none, preempted > 0) == (0, True)
    assert len(expected) == len(LENGTHS) * OUTPUT and found.keys() == expected.keys()
    for place, row in expected.items():
        assert native_llama.equal_bits(found[place], row), place
