"""Logits -> log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from baton.engine.plan import Scores, Slice
from baton.protocol.sampling import PromptRows

ROWS = 64  # whose logits are made at a time: of a vocabulary of 128,000, 33 MB

Rows = npt.NDArray[np.float32]


def score(rows: Rows, targets: Sequence[int], count: int) -> Scores:
    """Log-probabilities of `targets`, and of the `count` most likely ids (ties: the lower id first).

    Args:
        rows: logits float32 [n, vocab], from n consecutive positions.
        targets: n ids: what came after each of these.
    """
    peak = rows.max(axis=1, keepdims=True)
    sums = np.exp(rows - peak).sum(axis=1, dtype=np.float64)
    norm = (peak[:, 0] + np.log(sums)).astype(np.float32)
    places = np.arange(len(rows))
    left = rows.copy() if count > 1 else rows
    top_ids = np.empty((len(rows), min(count, rows.shape[1])), dtype=np.uint32)
    top = np.empty(top_ids.shape, dtype=np.float32)
    for rank in range(top_ids.shape[1]):
        best = left.argmax(axis=1)
        top_ids[:, rank], top[:, rank] = best, rows[places, best] - norm
        if left is not rows:
            left[places, best] = -np.inf
    return Scores(rows[places, list(targets)] - norm, top_ids, top)


def score_slice(part: Slice, compute: Callable[[Slice], Rows]) -> tuple[Scores, Rows]:
    """The scores of a slice that has a `score`, and the logits [vocab] of its last token.

    Args:
        compute: computes a piece of it, and gives the logits of all its tokens, float32 [tokens, vocab],
            good until it is called again.
    """
    wanted = part.score
    assert wanted is not None
    parts: list[Scores] = []
    rows: Rows = np.empty((0, 0), dtype=np.float32)
    for piece in _pieces(part):
        rows = compute(piece)
        at = piece.start - part.start
        begin, end = max(wanted.first, at), min(wanted.first + len(wanted.targets), at + len(rows))
        if begin < end:
            targets = wanted.targets[begin - wanted.first : end - wanted.first]
            parts.append(score(rows[begin - at : end - at], targets, wanted.count))
    return Scores(
        np.concatenate([each.chosen for each in parts]),
        np.concatenate([each.top_ids for each in parts]),
        np.concatenate([each.top for each in parts]),
    ), rows[-1]


def _pieces(part: Slice) -> Iterator[Slice]:
    """A slice cut into slices of at most `ROWS` tokens, to be computed one after the other."""
    for at in range(0, len(part.tokens), ROWS):
        tokens = part.tokens[at : at + ROWS]
        yield replace(part, tokens=tokens, start=part.start + at, sample=None, score=None)


def packed(scores: Scores, start: int) -> PromptRows:
    """Scores as they travel; `start` is the position of the first target."""
    return PromptRows(
        start=start,
        chosen=scores.chosen.astype("<f4", copy=False).tobytes(),
        top_ids=scores.top_ids.astype("<u4", copy=False).tobytes(),
        top=scores.top.astype("<f4", copy=False).tobytes(),
    )
