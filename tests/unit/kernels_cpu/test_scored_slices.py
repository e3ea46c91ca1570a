"""Both CPU engines: a scored prompt has, in each place, the log-probabilities of what is sampled there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import native_llama
import numpy as np
import pytest
import tiny_llama
import torch

from baton.engine.plan import SampleSpec, Score, Slice, StepPlan
from baton.engine.scoring import ROWS, score
from baton.protocol.sampling import SamplingParams

LENGTH = 2 * ROWS + 21
PROMPT = random.Random(3).choices(range(3, 515), k=LENGTH)
Make = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("scored") / "model")


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Any:
    return {"native": native_llama.runner, "torch": tiny_llama.runner}[request.param](folder)


def part(start: int, end: int, first: int, *, sampled: bool = False, name: str = "a") -> Slice:
    spec = SampleSpec(SamplingParams(logprobs=2), 0, 0, PROMPT, LENGTH) if sampled else None
    targets = PROMPT[start + first + 1 : min(end + 1, LENGTH)]
    return Slice((name, 0, 0), PROMPT[start:end], start, list(range(12)), spec, Score(first, targets, 2))


def expected(runner: Any) -> Any:
    """Each position's logits by a step of its own."""
    rows = []
    for at in range(LENGTH):
        step = StepPlan(1, [Slice(("b", 0, 0), PROMPT[at : at + 1], at, list(range(20, 32)), None)])
        rows.append(np.asarray(runner.logits(step)[0]).copy()[: runner.model.vocab_size])
    return score(np.array(rows)[:-1], PROMPT[1:], 2)


def test_scores_are_those_of_single_steps(runner: Any) -> None:
    whole, wanted = part(0, LENGTH, 0, sampled=True), expected(runner)
    made = runner.execute(StepPlan(1, [whole]))
    for name in ("chosen", "top_ids", "top"):
        assert np.array_equal(getattr(made.scores[0], name), getattr(wanted, name)), name
    plain = Slice(("c", 0, 0), PROMPT, 0, list(range(12, 24)), whole.sample)
    beside = runner.execute(StepPlan(1, [part(0, 70, 5), plain, part(70, LENGTH, 30)]))
    assert beside.samples[0] is None and beside.samples[1] == made.samples[0] and beside.samples[2] is None
    assert np.array_equal(beside.scores[0].chosen, wanted.chosen[5:70])
    assert np.array_equal(beside.scores[2].chosen, wanted.chosen[100:])
