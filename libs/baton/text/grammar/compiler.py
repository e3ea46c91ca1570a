"""Compiles grammars over one vocabulary: once each, bounded, checked down to the first mask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from baton.text.grammar.schema import GrammarError
from baton.text.grammar.vocabulary import Vocabulary

MAX_CACHED = 256
# A lexer state takes 1 to 2 KB; 20,000 Earley items about 1 ms (llguidance's own figures).
MAX_LEXER_STATES = 50_000
MAX_STEP_ITEMS = 20_000
MAX_GRAMMAR_SIZE = 200_000


class GrammarCompiler:
    """Threads may share it. The vocabulary is read when the first grammar comes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._load = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, LLMatcher | GrammarError] = OrderedDict()

    @property
    def vocabulary(self) -> Vocabulary:
        """Read now if it was not yet."""
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def knows(self, grammar: str) -> bool:
        """Whether `matcher` answers at once."""
        with self._lock:
            return grammar in self._cache

    def matcher(self, grammar: str) -> LLMatcher:
        """A fresh matcher at the grammar's start.

        Raises:
            GrammarError: it is no grammar, or too complex.
        """
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
            with self._lock:
                self._cache[grammar] = found
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found.deep_copy()

    def _compile(self, grammar: str) -> LLMatcher | GrammarError:
        vocabulary = self.vocabulary
        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            step_max_items=MAX_STEP_ITEMS,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        matcher = LLMatcher(vocabulary.ll, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return GrammarError(matcher.get_error())
        words, trial = np.zeros(vocabulary.size, dtype=np.uint32), matcher.deep_copy()
        trial.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if trial.is_error():
            return GrammarError(trial.get_error())
        if not words.any():
            return GrammarError("nothing can satisfy it: it leads back to itself without an end")
        return matcher
