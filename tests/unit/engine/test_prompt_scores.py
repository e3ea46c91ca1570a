"""Log-probabilities of prompts: every row once, whatever is cached, however the prompt is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_rig import BLOCK, Rig, text, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.plan import Scores, StepPlan, StepResult
from baton.engine.scoring import score
from baton.engine.sequence import Sequence, Status
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_scores


class Scored:
    """What a rig's steps said of each sequence's prompt."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.parts: dict[str, list[Scores]] = {}
        self.rows: dict[str, int] = {}

    def step(self) -> StepPlan | None:
        plan = self.rig.step()
        for news in self.rig.news:
            if news.scores is not None:
                name = news.seq.request
                assert news.scored_from == self.rows.get(name, 0) + 1, "rows in order, each once"
                self.rows[name] = self.rows.get(name, 0) + len(news.scores.chosen)
                self.parts.setdefault(name, []).append(news.scores)
        return plan

    def run(self) -> None:
        while self.rig.engine.has_work:
            assert self.step() is not None

    def check(self, seq: Sequence, count: int) -> None:
        wanted = expected_scores(seq.tokens[: seq.prompt_len], count)
        for name in ("chosen", "top_ids", "top"):
            made = np.concatenate([getattr(part, name) for part in self.parts[seq.request]])
            assert np.array_equal(made, getattr(wanted, name)), name


def scoring(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(prompt_logprobs=count, **{"max_tokens": 3, **more})


def test_every_row_of_a_prompt_in_chunks() -> None:
    rig = Rig(max_batch_tokens=7)
    scored = Scored(rig)
    seqs = [rig.add(str(count), text(count, 30 + count), scoring(count)) for count in (0, 1, 5)]
    scored.run()
    for seq, count in zip(seqs, (0, 1, 5), strict=True):
        scored.check(seq, count)
        assert seq.output == undisturbed(seq)


def test_the_prefix_cache_is_not_read_but_filled() -> None:
    rig = Rig()
    first = rig.add("first", text(1, 5 * BLOCK), SamplingParams(max_tokens=2))
    rig.run()
    scored = Scored(rig)
    seq = rig.add("second", text(1, 5 * BLOCK), scoring(2))
    scored.run()
    assert seq.cached_tokens == 0
    scored.check(seq, 2)
    third = rig.add("third", text(1, 5 * BLOCK), SamplingParams(max_tokens=2))
    rig.run()
    assert third.cached_tokens == 4 * BLOCK and third.output == first.output


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    rig = Rig(blocks=12, max_batch_tokens=16)
    scored = Scored(rig)
    low = rig.add("low", text(1, 9 * BLOCK), scoring(1))
    scored.step()
    scored.step()
    assert scored.rows["low"] == 32
    high = rig.add("high", text(2, 6 * BLOCK), SamplingParams(max_tokens=2), priority=1)
    scored.run()
    assert low.preemptions == 1 and high.output == undisturbed(high)
    scored.check(low, 1)
    assert low.output == undisturbed(low)


def test_a_state_that_is_handed_over_scores_nothing_more() -> None:
    rig = Rig()
    seq = rig.add("a", text(1, 20), scoring(1), prefill_only=True)
    scored = Scored(rig)
    while seq.status is not Status.HELD:
        scored.step()
    scored.check(seq, 1)
    assert seq.to_state(0.0).sampling.prompt_logprobs == -1


def test_a_prompt_of_one_token_has_none() -> None:
    rig = Rig()
    scored = Scored(rig)
    seq = rig.add("a", [65], scoring(1))
    scored.run()
    assert not scored.parts and seq.output == undisturbed(seq)


def test_rows_that_mean_nothing_end_the_sequence() -> None:
    rig = Rig(max_batch_tokens=8)
    rig.add("a", text(1, 20), scoring(1))
    plan = rig.engine.schedule(1.0)
    assert plan is not None
    result = rig.runner.execute(plan)
    result.scores[0].chosen[3] = np.nan
    (news,) = rig.engine.commit(plan, result, 1.0)
    assert news.failure is not None and not rig.engine.has_work
    rig.add("b", text(1, 20), scoring(1))
    plan = rig.engine.schedule(1.0)
    assert plan is not None
    (news,) = rig.engine.commit(plan, StepResult([None]), 1.0)
    assert news.failure is not None
    rig.engine.check()


def test_ties_go_to_the_lower_id_and_unlikely_targets_are_told() -> None:
    rows = np.array([[0.0, 2.0, 2.0, -np.inf], [1.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    made = score(rows, [3, 0], 3)
    assert made.top_ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    assert made.chosen[0] == -np.inf and made.chosen[1] == made.top[1, 0]
    assert np.allclose(np.exp(made.top[0]).sum(), 1.0)
    assert score(rows, [0, 0], 9).top.shape == (2, 4)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(-1, 3), st.sampled_from([0, 0, 1])), min_size=1, max_size=6
    ),
    st.integers(1, 20),
    st.integers(7, 16),
)
@settings(max_examples=60, deadline=None)
def test_any_mix(work: list[tuple[int, int, int]], budget: int, blocks: int) -> None:
    rig = Rig(blocks=blocks, max_batch_tokens=budget)
    scored = Scored(rig)
    seqs = []
    for number, (length, count, priority) in enumerate(work):
        params = SamplingParams(max_tokens=9, prompt_logprobs=count)
        seqs.append((rig.add(str(number), text(number % 2, length), params, priority=priority), count))
        scored.step()
    scored.run()
    for seq, count in seqs:
        assert seq.output == undisturbed(seq)
        if count >= 0 and seq.prompt_len > 1:
            scored.check(seq, count)
        else:
            assert seq.request not in scored.parts
    assert rig.pool.used == 0
