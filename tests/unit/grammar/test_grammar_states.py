"""A state is a function of the output tokens: wherever it is rebuilt, the same may follow."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from baton.config.load import load
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.masks import GrammarFailure, restrict
from baton.engine.plan import FAILED, SampleSpec, Slice, StepPlan
from baton.engine.sampling import sample
from baton.engine.sequence import Sequence
from baton.kvcache.pool import KvPool
from baton.protocol.request import Structure
from baton.protocol.sampling import Constraint, SamplingParams
from baton.runner.constrained import ConstrainedRunner
from baton.runner.create import create
from baton.runner.mock import expected_tokens
from baton.text.grammar import states as module
from baton.text.grammar.compose import compose
from baton.text.grammar.open import open_states
from baton.text.grammar.states import GrammarStates
from baton.text.mock import EOS

PROMPT = [97, 98, 99]


def constraint(structure: Structure) -> Constraint:
    made = compose(structure, None, None)
    assert made is not None
    return made


FORM = constraint(Structure(kind="json_object"))


@pytest.fixture
def states() -> GrammarStates:
    return open_states("mock", "")


def spec(output: list[int], form: Constraint = FORM, **params: Any) -> SampleSpec:
    made = SamplingParams(constraint=form, stop_token_ids=[EOS], **params)
    return SampleSpec(made, 0, len(output), PROMPT + output, len(PROMPT))


def test_masks_do_not_depend_on_how_a_state_came_about(states: GrammarStates) -> None:
    output = list(b'{"key": ["a\\"b", -1.5e3, null], "k2": {"x": tr')
    others = open_states("mock", "")
    for index in range(len(output)):
        stepwise = states.begin(("r", 0, 0), spec(output[:index])).words()
        at_once = others.begin((f"r{index}", 1, 0), spec(output[:index])).words()
        assert np.array_equal(stepwise, at_once)


def test_a_dropped_state_is_read_again(states: GrammarStates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STATES", 2)
    output = list(b'{"a": [1, ')
    wanted = states.begin(("r", 0, 0), spec(output)).words()
    for other in range(5):
        states.begin((f"other{other}", 0, 0), spec([])).words()
    assert np.array_equal(states.begin(("r", 0, 0), spec(output)).words(), wanted)


def test_an_idle_state_is_dropped(states: GrammarStates) -> None:
    states.begin(("gone", 0, 0), spec([])).words()
    for step in range(module.IDLE_STEPS + 2):
        states.step()
        states.begin(("here", 0, 0), spec(list(b"{")[: step % 2])).words()
    assert list(states._states) == [("here", 0, 0)]


def test_what_is_not_allowed_is_a_failure_of_that_sequence_alone(states: GrammarStates) -> None:
    with pytest.raises(GrammarFailure, match="cannot go on"):
        states.begin(("r", 0, 0), spec(list(b"[1"))).words()
    assert states.begin(("s", 0, 0), spec(list(b"{"))).words().any()


def test_a_grammar_that_is_none_fails_with_its_sequence(states: GrammarStates) -> None:
    broken = Constraint(grammar="no grammar")
    pending = states.begin(("r", 0, 0), spec([], broken))
    sampled = sample(
        np.zeros(512, dtype=np.float32), SampleSpec(SamplingParams(), 0, 0, PROMPT, 3, None, pending)
    )
    assert sampled.token == FAILED
    assert "grammar" in sampled.problem


def test_masks_of_many_sequences_at_once(states: GrammarStates) -> None:
    """Threads share a compiler; every sequence gets its own."""
    found: dict[int, list[int]] = {}

    def run(number: int) -> None:
        params = SamplingParams(seed=number % 4, temperature=1.0, max_tokens=60, constraint=FORM)
        mine = GrammarStates(states.compiler)
        found[number] = expected_tokens(PROMPT, params, states=mine)
        mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == [found[number] for number in range(4, 8)]
    assert all(found.values())


def test_restrict_leaves_the_scores_as_they_are() -> None:
    scores = np.arange(100, dtype=np.float32)
    words = np.array([0b1010, 0, 1], dtype=np.uint32)
    out = restrict(scores, words)
    assert np.flatnonzero(np.isfinite(out)).tolist() == [1, 3, 64]
    assert out[3] == 3.0
    assert scores[0] == 0.0
    assert np.isneginf(restrict(scores, words[:1])[32:]).all()  # ids beyond the mask


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.8, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 9},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0},
        {"logit_bias": dict.fromkeys(range(97, 123), 100.0)},
        {"logprobs": 3},
        {"min_tokens": 50},
    ],
)
def test_only_what_is_allowed_is_chosen(states: GrammarStates, params: dict[str, Any]) -> None:
    form = constraint(Structure(kind="regex", text="[0-9]{3}x?"))
    made = SamplingParams(constraint=form, max_tokens=20, stop_token_ids=[EOS], **params)
    out = expected_tokens(PROMPT, made, states=states)
    text = bytes(token for token in out if token < 256).decode()
    assert text.rstrip("x").isdigit()
    assert len(text) in (3, 4)


def run_alone(runner: ConstrainedRunner, params: SamplingParams, limit: int = 200) -> list[int]:
    tokens = list(PROMPT)
    blocks = list(range(20))
    start = 0
    for index in range(limit):
        want = SampleSpec(params, 0, index, tokens, len(PROMPT))
        plan = StepPlan(index + 1, [Slice(("r", 0, 0), tokens[start:], start, blocks, want)])
        sampled = runner.execute(plan).samples[0]
        assert sampled is not None
        start = len(tokens)
        tokens.append(sampled.token)
        if sampled.complete or sampled.token == EOS:
            break
    return tokens[len(PROMPT) :]


def test_a_runner_makes_what_is_expected(states: GrammarStates) -> None:
    runner = create(load(None, {"BATON_WORKER_ENGINE": "mock", "BATON_MODEL_NAME": "mock"}, {}))
    runner.attach(KvPool.create_private(runner.geometry, 20))
    params = SamplingParams(constraint=FORM, seed=3, temperature=0.7, max_tokens=200, stop_token_ids=[EOS])
    ready = runner.prepare(params)
    assert ready is not None
    ready.result(timeout=20)
    assert runner.prepare(params) is None
    assert run_alone(runner, params) == expected_tokens(PROMPT, params, states=states)
    runner.close()


def test_pre_emption_changes_nothing(states: GrammarStates) -> None:
    """A pool too small for all of them: some wait, are computed again, and go on where they were."""
    runner = create(load(None, {"BATON_WORKER_ENGINE": "mock", "BATON_MODEL_NAME": "mock"}, {}))
    pool = KvPool.create_private(runner.geometry, 12)
    runner.attach(pool)
    config = EngineConfig(runner.fingerprint, 4_096, 64, 8, 100)
    engine = Engine(config, BlockPool(12, runner.geometry.block_size, pool.generations))
    form = constraint(Structure(kind="regex", text="([0-9]{10}[a-z]){8}"))
    wanted = {}
    for number in range(4):
        params = SamplingParams(
            constraint=form, seed=number, temperature=1.0, max_tokens=100, stop_token_ids=[EOS]
        )
        mine = [*PROMPT, 97 + number]
        wanted[str(number)] = expected_tokens(mine, params, choice=number, states=states)
        engine.add(
            Sequence(str(number), 0, list(mine), len(mine), params, choice=number, priority=number % 2)
        )
    preempted = 0
    found = {}
    while engine.has_work:
        plan = engine.schedule(0.0)
        assert plan is not None
        for progress in engine.commit(plan, runner.execute(plan), 0.0):
            assert progress.failure is None
            preempted = max(preempted, progress.seq.preemptions)
            if progress.finish:
                found[progress.seq.request] = progress.seq.output
    assert found == wanted
    assert all(len(output) == 88 for output in found.values())
    assert preempted
    runner.close()
