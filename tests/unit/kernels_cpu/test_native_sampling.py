"""Sampling in the kernels: the tokens and log-probabilities of `baton.engine.sampling`, by any rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_llama import library

from baton.engine.masks import GrammarFailure, Words
from baton.engine.plan import FAILED, Sampled, SampleSpec
from baton.engine.sampling import sample
from baton.protocol.sampling import SamplingParams
from baton.runner.native_sampling import NativeSampling
from baton_kernels.cpu import library as c
from baton_kernels.cpu.build import Variant, best_variant
from baton_kernels.cpu.library import COp, CShape, CStep

Row = npt.NDArray[np.float32]

VARIANTS: tuple[Variant, ...] = ("portable",) if best_variant() == "portable" else ("avx2", "portable")


class Chooser:
    """The kernels' sampling alone."""

    def __init__(self, variant: Variant, threads: int = 2) -> None:
        self._executor = library(variant).executor(
            CShape(8, 1, 1, 8, 8, 1, 16, 8, 1e-6), [COp(c.EMBED, parts=1)], threads
        )

    def __call__(self, rows: Row, specs: list[SampleSpec]) -> list[Sampled]:
        """Row by row of float32 [rows, vocab], which is left as it is."""
        spoilt = rows.copy()
        sampling = NativeSampling(rows.shape[1])
        step = CStep(sampled=len(rows), logits=spoilt.ctypes.data, logits_stride=rows.shape[1])
        sampling.lay_out(step, specs)
        self._executor.choose(step)
        return sampling.results()


CHOOSERS = {variant: Chooser(variant) for variant in VARIANTS}


@dataclass
class Mask:
    """A grammar's mask that is made already; without words, one that failed."""

    bits: Words | None

    def words(self) -> Words:
        if self.bits is None:
            raise GrammarFailure("too complex")
        return self.bits


rows = st.builds(
    lambda seed, size, scale, steps: (
        np.round(np.random.default_rng(seed).standard_normal(size) * scale * steps).astype(np.float32)
        / np.float32(steps)
    ),
    st.integers(0, 2**32),
    st.integers(2, 1_500),
    st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    st.sampled_from([1, 4, 2**12]),  # coarse steps make ties
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Row, SampleSpec]:
    row = draw(rows)
    ids = st.integers(0, len(row) - 1)
    params = SamplingParams(
        seed=draw(st.integers(0, 2**64 - 1)),
        temperature=draw(st.sampled_from([0.0, 9e-6, 1e-4, 0.2, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 20, 50, 1_000, 10_000])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.4])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100), max_size=4)),
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_token_ids=draw(st.lists(ids, max_size=3)),
        logprobs=draw(st.sampled_from([-1, -1, 0, 1, 5, 20])),
    )
    tokens = draw(st.lists(ids, min_size=1, max_size=30))
    spec = SampleSpec(params, draw(st.integers(0, 9)), draw(st.integers(0, 5)), tokens, 1)
    if draw(st.integers(0, 3)) == 0:
        bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2**32, len(row) // 32 + 1)
        spec.allowed = Mask(bits.astype(np.uint32)[: draw(st.integers(1, len(bits)))])
    return row, spec


def equal(ours: Sampled, theirs: Sampled) -> None:
    assert ours.token == theirs.token
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    if ours.logprobs is not None and theirs.logprobs is not None:
        assert ours.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-9)
        assert ours.logprobs.top_ids == theirs.logprobs.top_ids
        assert ours.logprobs.top == pytest.approx(theirs.logprobs.top, abs=1e-9)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_rules_of_the_engine(case: tuple[Row, SampleSpec]) -> None:
    row, spec = case
    for choose in CHOOSERS.values():
        (ours,) = choose(row[None], [spec])
        equal(ours, sample(row, spec))


@pytest.mark.parametrize("change", [{}, {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.05}, {"logprobs": 3}])
def test_a_whole_vocabulary_many_draws(change: dict[str, float]) -> None:
    rng = np.random.default_rng(7)
    table = (rng.standard_normal((8, 49_152)) * 3).astype(np.float32)
    for index in range(6):
        specs = [
            SampleSpec(SamplingParams(temperature=1.0, seed=row, **change), 0, index, [0], 1)  # type: ignore[arg-type]
            for row in range(8)
        ]
        ours = {variant: choose(table, specs) for variant, choose in CHOOSERS.items()}
        for row, spec in enumerate(specs):
            for found in ours.values():
                equal(found[row], sample(table[row], spec))
        assert len({str(found) for found in ours.values()}) == 1, "the same bits"


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_fails_its_row_only(wrong: float, temperature: float) -> None:
    table = np.zeros((3, 200), dtype=np.float32)
    table[1, 130] = wrong
    table[2] = -np.inf
    spec = SampleSpec(SamplingParams(temperature=temperature, logprobs=2), 0, 0, [0], 1)
    for choose in CHOOSERS.values():
        tokens = [sampled.token for sampled in choose(table, [spec] * 3)]
        assert tokens[0] != FAILED
        assert tokens[1:] == [FAILED, FAILED]


def test_a_grammar_that_cannot_go_on_fails_its_row_only() -> None:
    table = np.zeros((2, 64), dtype=np.float32)
    stuck = SampleSpec(SamplingParams(), 0, 0, [0], 1, allowed=Mask(None))
    only = SampleSpec(SamplingParams(), 0, 0, [0], 1, allowed=Mask(np.array([0, 2], dtype=np.uint32)))
    first, second = CHOOSERS[best_variant()](table, [stuck, only])
    assert (first.token, first.problem) == (FAILED, "too complex")
    assert second.token == 33


def test_ids_out_of_range_are_refused() -> None:
    spec = SampleSpec(SamplingParams(logit_bias={64: 1.0}), 0, 0, [0], 1)
    with pytest.raises(ValueError, match="do not exist"):
        CHOOSERS[best_variant()](np.zeros((1, 64), dtype=np.float32), [spec])
