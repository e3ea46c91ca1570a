"""A model's vocabulary as llguidance wants it: each token's bytes, and which ids end an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from baton.engine.masks import Words
from baton.text.tokenizer import Tokenizer


class _Source:
    """What `TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer, plain: frozenset[int]) -> None:
        self.eos_token_id = _ends(tokenizer)[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(set(tokenizer.specials) - plain)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, special=False)


class Vocabulary:
    """One vocabulary, shared by every grammar over it. Takes about 10 MB and half a second for 49,152 ids.

    Attributes:
        ll: as llguidance takes it.
        digits, spaces, lines: the ids whose text begins with a digit, with white space, with white space that
            holds a line's end, as words of a mask.

    Args:
        tags: texts, such as `<tool_call>`, which a grammar spells like any other text although they are
            special tokens of some models.
    """

    def __init__(self, tokenizer: Tokenizer, tags: Sequence[str] = ()) -> None:
        wanted = frozenset(tags)
        plain = frozenset(id_ for id_, token in tokenizer.specials.items() if token.text in wanted)
        source = _Source(tokenizer, plain)
        self.tokenizer = tokenizer
        self.ll = LLTokenizer(TokenizerWrapper(source), eos_token=_ends(tokenizer))
        self.size = -(-tokenizer.vocab_size // 32)  # words of a mask
        self._bytes = source.tokens
        self.digits = self._words(lambda raw: raw[:1].isdigit())
        self.spaces = self._words(lambda raw: raw[:1].isspace())
        self.lines = self._words(lambda raw: not {10, 13}.isdisjoint(raw[: len(raw) - len(raw.lstrip())]))

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def _words(self, wanted: Callable[[bytes], bool]) -> Words:
        bits = np.zeros(32 * self.size, dtype=np.uint8)
        bits[: len(self._bytes)] = [wanted(raw) for raw in self._bytes]
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _ends(tokenizer: Tokenizer) -> list[int]:
    """The ids that end an answer. A vocabulary without any ends where its grammar is complete."""
    return tokenizer.eos_ids or [tokenizer.vocab_size - 1]
