"""Choosing tokens on the device: the rules of `baton.engine.sampling`, and its tokens.

Each row is one program's. What is drawn from is float64 as on the CPU; sums run in another order, so a
draw within about 1e-13 of a border may fall on its other side. The draw itself comes with the row: it is a
pure function of seed, choice and output index, and the host knows all three before the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.launch import launch
from baton_kernels.gpu.select import border, kept, row_scores, weight_of

BLOCK = 512  # ids worked on at once
NO_MIN_P = 1.0  # in place of a logarithm, which is never positive
BIAS, BAN, PENALTY = 0, 1, 2  # what an edit does


@triton.jit
def _edit(scores, vocab_stride, rows, offsets, ids, amounts, rates, KIND: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    row = tl.load(rows + number).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    end = tl.load(offsets + number + 1)
    for begin in range(tl.load(offsets + number), end, BLOCK):
        here = begin + lane < end
        at = scores + row * vocab_stride + tl.load(ids + begin + lane, mask=here, other=0)
        score = tl.load(at, mask=here, other=0.0)
        amount = tl.load(amounts + begin + lane, mask=here, other=0.0)
        if KIND == 0:
            score += amount
        elif KIND == 1:
            score = tl.where(here, float("-inf"), score)
        else:
            repetition = tl.load(rates + 3 * number)
            punished = tl.where(score > 0, tl.math.div_rn(score, repetition), score * repetition)
            score = tl.where(repetition != 1.0, punished, score)
            score -= tl.load(rates + 3 * number + 1) * amount
            score -= tl.load(rates + 3 * number + 2) * tl.where(amount > 0, 1.0, 0.0)
        tl.store(at, score, mask=here)


def edit_scores(
    scores: Tensor, kind: int, rows: Tensor, offsets: Tensor, ids: Tensor, amounts: Tensor, rates: Tensor
) -> None:
    """Changes some scores of some rows in place.

    Args:
        scores: float32 [rows, vocab].
        kind: BIAS adds `amounts`; BAN makes -inf; PENALTY takes amounts as counts in the output and applies
            `rates`: repetition, then frequency and presence.
        rows: int32 [n], the rows with edits; offsets: int32 [n + 1], whose edits lie where.
        ids: int32 [edits], none twice in a row; amounts: float32 [edits]; rates: float32 [n, 3].
    """
    args = {
        "scores": scores, "vocab_stride": scores.stride(0), "rows": rows, "offsets": offsets, "ids": ids,
        "amounts": amounts, "rates": rates,
    }  # fmt: skip
    launch(_edit, (len(rows),), args, {"KIND": kind, "BLOCK": BLOCK})


@triton.jit
def _largest(scores, words, vocab, num_words, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """(the largest score, the first id that has it, whether a score is NaN)."""
    lane = tl.arange(0, BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    best = tl.zeros((), tl.int32)
    broken = tl.zeros((), tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + lane
        score = row_scores(scores, words, at, vocab, num_words, MASKED)
        nan = score != score
        broken += tl.sum(nan.to(tl.int32), 0)
        score = tl.where(nan, float("-inf"), score)
        highest = tl.max(score, 0)
        if highest > peak:
            peak = highest
            best = tl.min(tl.where(score == highest, at, 2_147_483_647), 0)
    return peak, best, broken > 0


@triton.jit
def _draw(
    scores, words, vocab, num_words, edge, last, lowest, peak, temperature, where,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The id that `where` in [0, 1) falls on among those that pass, by the running sum of weights."""
    lane = tl.arange(0, BLOCK)
    whole = tl.zeros((), tl.float64)
    for begin in range(0, vocab, BLOCK):
        score = row_scores(scores, words, begin + lane, vocab, num_words, MASKED)
        passed = kept(score, begin + lane, edge, last, lowest)
        whole += tl.sum(weight_of(score, passed, peak, temperature, False), 0)
    target = where * whole
    before = tl.zeros((), tl.float64)
    chosen = tl.full((), -1, tl.int32)
    fallback = tl.zeros((), tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + lane
        score = row_scores(scores, words, at, vocab, num_words, MASKED)
        passed = kept(score, at, edge, last, lowest)
        weights = weight_of(score, passed, peak, temperature, False)
        beyond = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
        first = tl.min(tl.where(beyond, at, 2_147_483_647), 0)
        if (chosen < 0) & (first < 2_147_483_647):
            chosen = first
        fallback = tl.maximum(fallback, tl.max(tl.where(weights > 0, at, 0), 0))
        before += tl.sum(weights, 0)
    return tl.where(chosen < 0, fallback, chosen)


@triton.jit
def _sample(
    scores, words, whole, real, tokens, vocab_stride, vocab, num_words,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    mine = scores + row.to(tl.int64) * vocab_stride
    allowed = words
    if MASKED:
        allowed = words + row.to(tl.int64) * num_words
    peak, token, broken = _largest(mine, allowed, vocab, num_words, BLOCK, MASKED)
    finite = (peak > float("-inf")) & (peak < float("inf")) & (not broken)
    greedy, top_k = tl.load(whole + 2 * row), tl.load(whole + 2 * row + 1)
    if finite & (greedy == 0):
        temperature, top_p = tl.load(real + 4 * row), tl.load(real + 4 * row + 1)
        min_p, where = tl.load(real + 4 * row + 2), tl.load(real + 4 * row + 3)
        top = peak.to(tl.float64)
        edge, last = tl.full((), -1, tl.int64), vocab
        lowest = tl.full((), float("-inf"), tl.float32)
        if (top_k > 0) & (top_k < vocab):
            edge, last = border(
                mine, allowed, vocab, num_words, top_k.to(tl.float64), 1.0, edge, last, lowest, top,
                temperature, BLOCK, MASKED, True,
            )  # fmt: skip
        if min_p <= 0.0:
            lowest = tl.minimum(top + temperature * min_p, top).to(tl.float32)
        if top_p < 1.0:
            edge, last = border(
                mine, allowed, vocab, num_words, 0.0, top_p, edge, last, lowest, top, temperature,
                BLOCK, MASKED, False,
            )  # fmt: skip
        token = _draw(
            mine, allowed, vocab, num_words, edge, last, lowest, top, temperature, where, BLOCK, MASKED
        )  # fmt: skip
    tl.store(tokens + row, tl.where(finite, token, -1))


def sample(
    scores: Tensor, vocab: int, whole: Tensor, real: Tensor, tokens: Tensor, words: Tensor | None = None
) -> None:
    """A token for each row.

    Args:
        scores: float32 [rows, >= vocab], edited; ids from `vocab` on are padding.
        whole: int32 [rows, 2]: whether to take the most likely, top-k (0: off).
        real: float64 [rows, 4]: temperature, top-p (1: off), log of min-p (or `NO_MIN_P`), draw in [0, 1).
        tokens: int32 [rows]: the ids chosen; -1 where the row's scores are not finite.
        words: int32 [rows, n], or None: bit i % 32 of word i // 32 set if id i may come.
    """
    args = {
        "scores": scores, "words": words, "whole": whole, "real": real, "tokens": tokens,
        "vocab_stride": scores.stride(0), "vocab": vocab, "num_words": 0 if words is None else words.shape[1],
    }  # fmt: skip
    launch(_sample, (len(tokens),), args, {"BLOCK": BLOCK, "MASKED": words is not None}, warps=8)
