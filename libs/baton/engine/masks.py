"""Which ids a grammar allows at one output position, and how sampling keeps to them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Logits = npt.NDArray[np.float32]


class GrammarFailure(RuntimeError):
    """A grammar cannot go on: too complex at this point, or not followed so far."""


class Allowed(Protocol):
    """A set of ids that may still be in the making."""

    def words(self) -> Words:
        """uint32 [n]: bit i % 32 of word i // 32 is set if id i may come; ids beyond may not.

        Waits until it is made.

        Raises:
            GrammarFailure: there is none.
        """
        ...


def restrict(scores: Logits, words: Words) -> Logits:
    """A copy of `scores`, float32 [vocab], with -inf at every id that is not allowed."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(len(scores), 32 * len(words)))
    out = np.full_like(scores, -np.inf)
    np.copyto(out[: len(bits)], scores[: len(bits)], where=bits.view(np.bool_))
    return out
