"""A model's grammars, from what the model is called."""

from __future__ import annotations

from baton.models.catalogue import resolve
from baton.text.grammar.compiler import GrammarCompiler
from baton.text.grammar.states import GrammarStates
from baton.text.grammar.tags import TAGS
from baton.text.grammar.vocabulary import Vocabulary
from baton.text.model_files import load_tokenizer
from baton.text.tokenizer import Tokenizer


def open_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """A compiler over a tokenizer at hand."""
    return GrammarCompiler(lambda: Vocabulary(tokenizer, TAGS))


def open_states(model: str, cache_dir: str) -> GrammarStates:
    """A worker's grammar states; the tokenizer is read with the first grammar."""
    return GrammarStates(GrammarCompiler(lambda: Vocabulary(load_tokenizer(resolve(model, cache_dir)), TAGS)))
