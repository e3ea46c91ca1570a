"""Which tokens a sequence has seen, counted as they come, and the penalties that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.protocol.sampling import SamplingParams


def penalised(params: SamplingParams) -> bool:
    """Whether these parameters need a `Seen`."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class Seen:
    """The distinct tokens of a sequence, and how often each came in the output.

    Follows from the tokens alone, so it can be rebuilt anywhere; kept because counting anew at each step
    would cost a pass over the whole context.
    """

    def __init__(self, tokens: Sequence[int], prompt_len: int) -> None:
        prompt = np.unique(np.asarray(tokens[:prompt_len], dtype=np.int64))
        self._row = {token: row for row, token in enumerate(prompt.tolist())}
        room = len(prompt) + 64
        self._ids = np.zeros(room, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(room, dtype=np.float32)
        for token in tokens[prompt_len:]:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more output token. O(1), amortised."""
        row = self._row.get(token)
        if row is None:
            row = self._row[token] = len(self._row)
            if row == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[row] = token
        self._counts[row] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, prompt and output, int64 [n]."""
        return self._ids[: len(self._row)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` is in the output, float32 [n]; 0 for tokens of the prompt only."""
        return self._counts[: len(self._row)]

    def penalise(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """Apply the three penalties to float32 [vocab] in place.

        Repetition first (Keskar et al. 2019, arXiv:1909.05858: over prompt and output, divides positive
        logits and multiplies negative ones), then frequency and presence (OpenAI: over the output).
        """
        ids, counts = self.ids, self.counts
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            factor = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / factor, values * factor)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values
