"""Sampling: every rule against a plain full-sort account of it, and its statistics."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.penalties import Seen
from baton.engine.plan import FAILED, SampleSpec
from baton.engine.sampling import adjust, draw, finish_reason, keep, largest, sample, token_logprobs, uniform
from baton.engine.sequence import Sequence
from baton.protocol.sampling import SamplingParams

Row = npt.NDArray[np.float32]


def spec(params: SamplingParams, index: int = 0, *, choice: int = 0) -> SampleSpec:
    return SampleSpec(params, choice, index, [0], 1)


def choose(row: Row, params: SamplingParams, index: int = 0, *, choice: int = 0) -> int:
    return sample(row, spec(params, index, choice=choice)).token


def plain_filter(row: Row, params: SamplingParams) -> dict[int, float]:
    """Kept id -> probability, by full sorts, in vLLM's order: temperature, min-p, top-k, top-p."""
    scores = row.astype(np.float64) / params.temperature
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = [token for token in order if row[token] > -np.inf]
    weight = {token: math.exp(scores[token] - scores[order[0]]) for token in order}
    order = [token for token in order if weight[token] >= params.min_p * (1 - 1e-12)]
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weight[token] for token in order)
    if params.top_p < 1:
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += weight[token]
            if mass >= params.top_p * total:
                break
        order = kept
    total = sum(weight[token] for token in order)
    return {token: weight[token] / total for token in order}


rows = st.builds(
    lambda seed, size, scale, steps: (
        np.round(np.random.default_rng(seed).standard_normal(size) * scale * steps).astype(np.float32)
        / np.float32(steps)
    ),
    st.integers(0, 2**32),
    st.integers(2, 700),
    st.sampled_from([0.1, 1.0, 4.0, 12.0]),
    st.sampled_from([1, 4, 2**12]),  # coarse steps make ties
)
knobs = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@given(rows, knobs)
@settings(max_examples=300, deadline=None)
def test_filters_equal_a_full_sort(row: Row, params: SamplingParams) -> None:
    ids, weights = keep(row, float(row.max()), params)
    names = range(len(row)) if ids is None else ids.tolist()
    assert not weights[len(names) :].any()
    got = dict(zip(names, weights.tolist(), strict=False))
    total = sum(got.values())
    got = {token: weight / total for token, weight in got.items() if weight}
    want = plain_filter(row, params)
    if got.keys() != want.keys():  # at a top-p border, where the last bits of the sum decide
        odd = got.keys() ^ want.keys()
        assert len(odd) == 1, (got.keys(), want.keys())
        cut = {token: chance for token, chance in want.items() if token not in odd}
        full = plain_filter(row, SamplingParams(**{**_fields(params), "top_p": 1.0}))
        assert sum(full[token] for token in cut) == pytest.approx(params.top_p, abs=1e-9)
    else:
        assert got == pytest.approx(want, rel=1e-6)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@given(rows, knobs, st.integers(0, 5_000), st.integers(1, 600))
@settings(max_examples=100, deadline=None)
def test_one_answer_whatever_the_padding(row: Row, params: SamplingParams, index: int, padding: int) -> None:
    padded = np.concatenate([row, np.full(padding, -np.inf, np.float32)])
    token = choose(row, params, index)
    assert token == choose(row, params, index), "a replay draws the same"
    assert token == choose(padded, params, index)


@given(rows, knobs, st.integers(0, 5_000))
@settings(max_examples=100, deadline=None)
def test_narrow_filters_are_greedy(row: Row, params: SamplingParams, index: int) -> None:
    greedy = int(np.flatnonzero(row == row.max())[0])
    for narrow in ({"top_k": 1}, {"top_p": 1e-12}, {"temperature": 0.0}, {"temperature": 9e-6}):
        assert choose(row, SamplingParams(**{**_fields(params), **narrow}), index) == greedy


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(temperature=0.6, seed=12),
        SamplingParams(temperature=1.3, top_k=7, seed=13),
        SamplingParams(temperature=1.0, top_p=0.8, seed=14),
        SamplingParams(temperature=1.0, min_p=0.1, seed=15),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, seed=16),
    ],
)
def test_frequencies(params: SamplingParams) -> None:
    """Chi-square of 6,000 draws against the exact probabilities, with fixed seeds."""
    row = (np.random.default_rng(5).standard_normal(600) * 2.5).astype(np.float32)
    want = plain_filter(row, params)
    draws = 6_000
    got = Counter(choose(row, params, index) for index in range(draws))
    assert got.keys() <= want.keys()
    common = [token for token, chance in want.items() if chance * draws >= 5]
    cells = [(got[token], want[token] * draws) for token in common]
    rest = draws - sum(expected for _, expected in cells)
    if rest >= 5:
        cells.append((draws - sum(seen for seen, _ in cells), rest))
    chi = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    assert chi < freedom + 3.3 * math.sqrt(2 * freedom), (chi, freedom)


def test_noise_is_uniform_and_depends_on_all_three() -> None:
    values = np.array(
        [uniform(seed, choice, index) for seed in range(20) for choice in range(5) for index in range(100)]
    )
    assert values.min() >= 0 and values.max() < 1
    assert len(set(values.tolist())) == len(values)
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 49 + 3.3 * math.sqrt(98)
    assert uniform(2**64 + 3, 0, 0) == uniform(3, 0, 0)


def test_noise_is_pinned() -> None:
    """Replays across versions rest on these values."""
    assert [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(2**64 - 1, 3, 7)] == [
        0.08775692700864313,
        0.1433351759408532,
        0.5055907092750717,
        0.16106675528193914,
    ]


def test_draw_lands_on_weights_only() -> None:
    weights = np.zeros(1_000)
    weights[[3, 255, 256, 700]] = [0.1, 0.2, 0.3, 0.4]
    landed = [draw(weights, where) for where in (0.0, 0.05, 0.11, 0.29, 0.31, 0.59, 0.61, 1 - 2**-53)]
    assert landed == [3, 3, 255, 255, 256, 256, 700, 700]
    assert draw(weights, 1.0) == 700, "a product rounded up to the total falls on the last weight"


def test_largest_settles_ties_by_the_lower_id() -> None:
    row = np.array([1, 5, 3, 5, 3, 3, 0], np.float32)
    assert [largest(row, count).tolist() for count in (1, 2, 3, 4, 6)] == [
        [1],
        [1, 3],
        [1, 2, 3],
        [1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
    ]


def test_logits_are_left_as_they_are() -> None:
    row = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    before = row.copy()
    params = SamplingParams(
        temperature=0.8,
        top_k=9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={3: 5.0},
        min_tokens=5,
        stop_token_ids=[4],
        logprobs=3,
    )
    sample(row, spec(params))
    assert (row == before).all()


def test_penalties_by_hand() -> None:
    row = np.array([2.0, -1.0, 3.0, 0.5, 0.0], np.float32)
    tokens = [0, 1, 2, 2, 3]  # prompt 0 1; output 2 2 3
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.1, temperature=1.0
    )
    got = adjust(row, SampleSpec(params, 0, 3, tokens, 2))
    want = [2.0 / 2, -1.0 * 2, 3.0 / 2 - 2 * 0.25 - 0.1, 0.5 / 2 - 0.25 - 0.1, 0.0]
    assert got.tolist() == pytest.approx(want)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=120), st.integers(1, 120))
@settings(max_examples=100, deadline=None)
def test_counts_kept_by_the_step_equal_counts_made_anew(tokens: list[int], border: int) -> None:
    border = min(border, len(tokens))
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)
    seq = Sequence("r", 1, tokens[:border], border, params)
    seq.spec()
    for token in tokens[border:]:
        seq.append(token, None)
    row = np.linspace(-3, 3, 41, dtype=np.float32)
    kept, anew = row.copy(), row.copy()
    seen = seq.spec().seen
    assert seen is not None
    seen.penalise(kept, params)
    Seen(tokens, border).penalise(anew, params)
    assert (kept == anew).all()
    output = Counter(tokens[border:])
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == {
        token: output[token] for token in set(tokens)
    }


def test_bias_and_the_stop_mask() -> None:
    row = np.zeros(10, np.float32)
    row[4] = 9.0
    assert choose(row, SamplingParams(logit_bias={7: 100.0})) == 7
    assert choose(row, SamplingParams(logit_bias={4: -100.0})) == 0
    params = SamplingParams(min_tokens=3, stop_token_ids=[4])
    assert [choose(row, params, index) for index in range(5)] == [0, 0, 0, 4, 4]


def test_logprobs_come_from_the_raw_logits() -> None:
    row = np.array([1.0, 3.0, 3.0, -2.0, -np.inf], np.float32)
    exact = row.astype(np.float64) - math.log(sum(math.exp(value) for value in row[:4]))
    sampled = sample(row, spec(SamplingParams(logit_bias={0: 50.0}, logprobs=3, temperature=0.5, top_k=1)))
    assert sampled.token == 0 and sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(exact[0])
    assert sampled.logprobs.top_ids == [1, 2, 0]
    assert sampled.logprobs.top == pytest.approx([exact[1], exact[2], exact[0]])
    assert token_logprobs(row, 3, 0).top_ids == []
    assert sample(row, spec(SamplingParams())).logprobs is None


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail(bad: list[float], temperature: float) -> None:
    assert (
        sample(np.array(bad, np.float32), spec(SamplingParams(temperature=temperature, logprobs=1))).token
        == FAILED
    )


def test_finish_rules() -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=[9])
    seq = Sequence("r", 1, [9, 9], 2, params)
    seq.max_len = 6
    ends = [finish_reason(seq)]
    for token in (9, 9, 9):
        seq.append(token, None)
        ends.append(finish_reason(seq))
    assert ends == ["", "", "", "stop"], "stop ids in the prompt, or before min_tokens, do not count"
    seq.append(9, None)
    assert finish_reason(seq) == "stop", "stop goes before length"
    seq.tokens[-1] = 1
    assert finish_reason(seq) == "length"
