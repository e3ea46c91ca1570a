"""Where one sequence's output stands in its grammar: a function of its output tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.engine.masks import GrammarFailure, Words
from baton.protocol.sampling import Constraint
from baton.text.grammar.compiler import GrammarCompiler
from baton.text.grammar.runs import Runs


class GrammarState:
    """Takes output tokens one by one; says what may come next.

    Raises:
        GrammarError: the constraint's grammar cannot be compiled.
    """

    def __init__(self, constraint: Constraint, compiler: GrammarCompiler) -> None:
        self._matcher = compiler.matcher(constraint.grammar)
        self._vocabulary = compiler.vocabulary
        self._runs = Runs(constraint) if constraint.json else None
        self.taken = 0  # output tokens
        self.used = 0  # for whoever keeps it: when it last was

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes the next output tokens.

        Raises:
            GrammarFailure: one of them is not allowed.
        """
        for token in tokens:
            if not self._matcher.consume_token(token):
                raise GrammarFailure(self._problem(f"output token {token} does not follow it"))
            self.taken += 1
            if self._runs is not None:
                self._runs.push(self._vocabulary.token_bytes(token))

    @property
    def complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def words(self) -> Words:
        """The ids that may come next, as words of a mask. About 60 us for a vocabulary of 49,152.

        Raises:
            GrammarFailure: the grammar is too complex here.
        """
        words = np.zeros(self._vocabulary.size, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarFailure(self._problem("too complex at this point"))
        runs = self._runs
        if runs is None or not (runs.digits_full or runs.spaces_full or runs.lines_full):
            return words
        fewer = words.copy()
        if runs.digits_full:
            fewer &= ~self._vocabulary.digits
        if runs.spaces_full:
            fewer &= ~self._vocabulary.spaces
        if runs.lines_full:
            fewer &= ~self._vocabulary.lines
        return fewer if fewer.any() else words

    def _problem(self, otherwise: str) -> str:
        return f"the answer's grammar cannot go on: {self._matcher.get_error() or otherwise}"[:500]
