"""A model's vocabulary as llguidance wants it: each token's bytes, and which ids end an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from baton.engine.masks import Words
from baton.text.matching import LongestMatch
from baton.text.tokenizer import Tokenizer

_BEFORE = "\n"  # stands before a text that is encoded as if amid another


class _Source:
    """What `TokenizerWrapper` reads.

    It is called for text that a grammar forces, which is then written as the model itself would: a tag as its
    token, and the rest as the encoder does amid a text. The tokens must spell just that text; where the
    encoder makes another one of it (SentencePiece's spaces), the longest tokens that fit are taken instead.
    """

    def __init__(self, tokenizer: Tokenizer, plain: frozenset[int]) -> None:
        self.eos_token_id = _ends(tokenizer)[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(set(tokenizer.specials) - plain)
        self._tokenizer = tokenizer
        tags = {token.text: token for token in map(tokenizer.specials.__getitem__, plain) if token.text}
        self._tags = LongestMatch(tags)

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        ids: list[int] = []
        done = 0
        for start, end, token in self._tags.finditer(text):
            ids += [*self._plain(text[done:start]), token.id]
            done = end
        return ids + self._plain(text[done:])

    def _plain(self, text: str) -> list[int]:
        raw = text.encode(errors="replace")
        if not self._tokenizer.space_prefix:
            ids = self._tokenizer.encode(text, special=False)
        else:
            ids = self._tokenizer.encode(_BEFORE + text, special=False)
            led = b""
            while ids and not led.endswith(_BEFORE.encode()):
                led += self.tokens[ids.pop(0)]
        if b"".join(self.tokens[id_] for id_ in ids) == raw:
            return ids
        return self._longest(raw)

    def _longest(self, raw: bytes) -> list[int]:
        """Always the longest token that fits; what no token begins with is left out."""
        ids: list[int] = []
        done = 0
        while done < len(raw):
            lengths = range(min(self._reach, len(raw) - done), 0, -1)
            found = next((n for n in lengths if raw[done : done + n] in self._by_bytes), 0)
            if found:
                ids.append(self._by_bytes[raw[done : done + found]])
            done += found or 1
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self._tokenizer.specials)
        return {raw: id_ for id_, raw in enumerate(self.tokens) if raw and id_ not in special}

    @cached_property
    def _reach(self) -> int:
        return max(map(len, self._by_bytes), default=1)


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
