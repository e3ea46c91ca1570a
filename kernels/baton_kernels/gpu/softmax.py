"""The running softmax of attention, in powers of two: pieces are merged by one function, in one order.

A row that sees nothing of a piece leaves it with peak `HIDDEN` and sums of zero, and merging that changes
no bit: so it does not matter how far beyond a row's own keys its neighbours in a tile look.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN: tl.constexpr = tl.constexpr(-1e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def merge(peak, total, mixed, next_peak, next_total, next_mixed):
    """Two pieces (peak [m], total [m], mixed [m, d]; float32) as one."""
    highest = tl.maximum(peak, next_peak)
    before, after = tl.exp2(peak - highest), tl.exp2(next_peak - highest)
    total = total * before + next_total * after
    mixed = mixed * before[:, None] + next_mixed * after[:, None]
    return highest, total, mixed


@triton.jit
def finish(peak, total, mixed, sink, SINKS: tl.constexpr):
    """The attended values [m, d]. `sink` [m] is a score that takes weight and gives nothing."""
    if SINKS:
        sink *= LOG2E
        highest = tl.maximum(peak, sink)
        shrunk = tl.exp2(peak - highest)
        total = total * shrunk + tl.exp2(sink - highest)
        mixed = mixed * shrunk[:, None]
    return mixed / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def capped(scores, cap):
    """`cap * tanh(scores / cap)` (Gemma 2, arXiv:2408.00118)."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (scores / cap))))
