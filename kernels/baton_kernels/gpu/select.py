"""Finding where the largest values of a row end, without sorting it.

Floats are compared as integers in the same order; the border is found digit by digit, in base sixteen: eight
passes over the row, whatever its size. Sums run in one order, so equal rows give equal answers.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-2_147_483_648)


@triton.jit
def order_key(x):
    """float32 -> int64 in 0 to 2^32 - 1, in the same order; -0 as 0, and no NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) - LOWEST


@triton.jit
def row_scores(scores, words, at, vocab, num_words, MASKED: tl.constexpr):
    """Scores of some ids of a row, float32; -inf past the vocabulary and where a grammar forbids."""
    inside = at < vocab
    found = tl.load(scores + at, mask=inside, other=float("-inf"))
    if MASKED:
        word = tl.load(words + at // 32, mask=inside & (at // 32 < num_words), other=0)
        found = tl.where(((word >> (at % 32)) & 1) == 1, found, float("-inf"))
    return found


@triton.jit
def kept(score, at, edge, last, lowest):
    """Which ids pass: above the border key, or on it and not past id `last`; and not below `lowest`."""
    key = order_key(score)
    return ((key > edge) | ((key == edge) & (at <= last))) & (score >= lowest)


@triton.jit
def weight_of(score, passed, peak, temperature, COUNT: tl.constexpr):
    """float64: 1 each, or exp((score - peak) / temperature); 0 where it has not passed."""
    if COUNT:
        return tl.where(passed, 1.0, 0.0).to(tl.float64)
    depth = (tl.where(passed, score, peak.to(tl.float32)).to(tl.float64) - peak) / temperature
    return tl.where(passed, tl.exp(depth), 0.0)


@triton.jit
def border(
    scores, words, vocab, num_words, goal, share, edge, last, lowest, peak, temperature,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The smallest set of the largest scores, of those that pass, whose weight reaches `goal`.

    With COUNT a weight is 1; else `goal` is ignored and `share` of the whole weight is asked for. Among
    equals the lower id goes first.

    Returns:
        (key of the set's smallest score, the last id with that score that is in the set).
    """
    digits = tl.arange(0, 16).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    found = tl.zeros((), tl.int64)
    for place in tl.static_range(8):
        candidates = found + (digits << (28 - 4 * place))
        masses = tl.zeros((16,), tl.float64)
        for begin in range(0, vocab, BLOCK):
            at = begin + lane
            score = row_scores(scores, words, at, vocab, num_words, MASKED)
            passed = kept(score, at, edge, last, lowest)
            weights = weight_of(score, passed, peak, temperature, COUNT)
            reached = order_key(score)[:, None] >= candidates[None, :]
            masses += tl.sum(tl.where(reached, weights[:, None], 0.0), 0)
        if not COUNT and place == 0:
            goal = share * tl.sum(tl.where(digits == 0, masses, 0.0), 0)
        found = tl.max(tl.where((masses >= goal) | (digits == 0), candidates, 0), 0)
    above = tl.zeros((), tl.float64)
    each = tl.zeros((), tl.float64)
    for begin in range(0, vocab, BLOCK):
        at = begin + lane
        score = row_scores(scores, words, at, vocab, num_words, MASKED)
        passed = kept(score, at, edge, last, lowest)
        weights = weight_of(score, passed, peak, temperature, COUNT)
        key = order_key(score)
        above += tl.sum(tl.where(key > found, weights, 0.0), 0)
        each = tl.maximum(each, tl.max(tl.where(key == found, weights, 0.0), 0))
    ties = tl.zeros((), tl.int32)
    end = last
    reached_it = False
    for begin in range(0, vocab, BLOCK):
        at = begin + lane
        score = row_scores(scores, words, at, vocab, num_words, MASKED)
        tie = kept(score, at, edge, last, lowest) & (order_key(score) == found)
        rank = ties + tl.cumsum(tie.to(tl.int32), 0)
        enough = tie & (above + rank.to(tl.float64) * each >= goal)
        first = tl.min(tl.where(enough, at, 2_147_483_647), 0)
        if (not reached_it) & (first < 2_147_483_647):
            end = first
            reached_it = True
        ties += tl.sum(tie.to(tl.int32), 0)
    return found, end
