"""Sampling rules as the records that the native kernels read: the same tokens as `baton.engine.sampling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.masks import GrammarFailure
from baton.engine.penalties import Seen, penalised
from baton.engine.plan import FAILED, Sampled, SampleSpec
from baton.engine.sampling import GREEDY_BELOW, uniform
from baton.protocol.sampling import SamplingParams, TokenLogprobs
from baton_kernels.cpu.library import CHOICE, CHOSEN, CStep

_OFF = -math.inf
_NOTHING = (0, 0)


class NativeSampling:
    """Lays out the choices of a step and reads what was chosen; one step at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._specs: Sequence[SampleSpec] = ()
        self._problems: dict[int, str] = {}
        self._kept: list[npt.NDArray[Any]] = []  # what the pointers of the last choices name
        self._rows = 0
        self._tops = 0
        self._grow(1, 1)

    def lay_out(self, step: CStep, specs: Sequence[SampleSpec]) -> None:
        """Gives a step its choices, one for each row of logits. Waits for masks of grammars."""
        tops = max((spec.params.logprobs for spec in specs), default=0)
        if len(specs) > self._rows or tops > self._tops:
            self._grow(max(len(specs), self._rows), max(tops, self._tops))
        self._specs, self._kept = specs, []
        self._problems.clear()
        for row, spec in enumerate(specs):
            CHOICE.pack_into(self._choices, row * CHOICE.size, *self._fields(row, spec))
        step.choices, step.chosen, step.top_ids, step.top = self._addresses
        step.tops, step.choosable = self._tops, self._vocab_size

    def results(self) -> list[Sampled]:
        """What was chosen in the last step laid out, row by row."""
        found = []
        for row, spec in enumerate(self._specs):
            token, tops, logprob = CHOSEN.unpack_from(self._chosen, row * CHOSEN.size)
            if row in self._problems:
                found.append(Sampled(FAILED, problem=self._problems[row]))
            elif token == FAILED or spec.params.logprobs < 0:
                found.append(Sampled(token))
            else:
                likely = self._top_ids[row, :tops].tolist(), self._top[row, :tops].tolist()
                found.append(Sampled(token, TokenLogprobs(logprob, *likely)))
        return found

    def _grow(self, rows: int, tops: int) -> None:
        self._rows, self._tops = rows, tops
        self._choices = bytearray(rows * CHOICE.size)
        self._chosen = bytearray(rows * CHOSEN.size)
        self._top_ids = np.zeros((rows, tops), dtype=np.int32)
        self._top = np.zeros((rows, tops), dtype=np.float64)
        records = [np.frombuffer(each, dtype=np.uint8) for each in (self._choices, self._chosen)]
        arrays: list[npt.NDArray[Any]] = [*records, self._top_ids, self._top]
        self._addresses = tuple(array.ctypes.data for array in arrays)

    def _fields(self, row: int, spec: SampleSpec) -> tuple[float | int, ...]:
        params = spec.params
        drawn = params.temperature >= GREEDY_BELOW
        biases, bias_ids, bias = self._biases(params)
        masked, masked_ids = self._ids(params.stop_token_ids if spec.index < params.min_tokens else ())
        seen, seen_ids, seen_counts = self._penalties(spec)
        words, allowed, skipped = self._allowed(row, spec)
        return (
            params.temperature if drawn else 0.0,
            params.top_p,
            math.log(min(params.min_p, 1.0)) if params.min_p > 0 else _OFF,
            uniform(params.seed, spec.choice, spec.index) if drawn else 0.0,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            min(params.top_k, self._vocab_size),
            params.logprobs,
            *(biases, masked, seen),
            *(bias_ids, bias, masked_ids, seen_ids, seen_counts, allowed),
            *(words, skipped),
        )

    def _keep(self, array: npt.NDArray[Any]) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)

    def _ids(self, ids: Sequence[int]) -> tuple[int, int]:
        return (len(ids), self._keep(np.array(ids, dtype=np.int32))) if ids else _NOTHING

    def _biases(self, params: SamplingParams) -> tuple[int, int, int]:
        if not params.logit_bias:
            return 0, 0, 0
        count, ids = self._ids(list(params.logit_bias))
        return count, ids, self._keep(np.array(list(params.logit_bias.values()), dtype=np.float32))

    def _penalties(self, spec: SampleSpec) -> tuple[int, int, int]:
        if not penalised(spec.params):
            return 0, 0, 0
        seen = spec.seen if spec.seen is not None else Seen(spec.tokens, spec.prompt_len)
        return len(seen.ids), self._keep(seen.ids), self._keep(seen.counts)

    def _allowed(self, row: int, spec: SampleSpec) -> tuple[int, int, int]:
        """Words of a grammar's mask, where they lie, and whether there is none to be had."""
        if spec.allowed is None:
            return 0, 0, 0
        try:
            words = np.ascontiguousarray(spec.allowed.words())
        except GrammarFailure as failure:
            self._problems[row] = str(failure)
            return 0, 0, 1
        return len(words), self._keep(words), 0
