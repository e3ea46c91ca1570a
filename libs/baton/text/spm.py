"""SentencePiece's BPE: encode as `sentencepiece` itself does, from a vocabulary with scores.

Merge the adjacent pair whose union is the piece of the highest score, of equal ones the leftmost, until there
is none. `tokenizers`' BPE ranks pairs, not pieces: the same up to ties, but a table of the pairs that join to
a piece takes 350 MB for Gemma's 262,144 pieces, so this is written out. Words are encoded one by one and
kept, which makes it as fast: pieces hold a space at their start only, but for some that the vocabulary shows.
Source: Kudo and Richardson, 2018 (arXiv:1808.06226), and `src/bpe_model.cc` of google/sentencepiece.
"""

from __future__ import annotations

import enum
import functools
import heapq
import re
from collections.abc import Iterator, Sequence

from baton.text.alphabet import SPACE, spm_byte
from baton.text.matching import LongestMatch

CACHED_WORDS = 16_384
CACHED_CHARS = 64  # longer words are not kept
MOST_GLUE = 64


class PieceType(enum.IntEnum):
    """`tokenizer.ggml.token_type`, which are SentencePiece's own numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SpmEncoder:
    """Plain text to ids.

    Args:
        pieces: the vocabulary by id; spaces are U+2581, or plain in user-defined pieces.
        scores: as many; higher merges first.
        types: as many.
        add_space_prefix: a text begins with a space it does not have.
        remove_extra_whitespaces: runs of spaces count as one, and none at a text's ends.
        unknown_id: stands for a run of characters that neither pieces nor byte pieces spell.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        *,
        add_space_prefix: bool = True,
        remove_extra_whitespaces: bool = False,
        unknown_id: int | None = None,
    ) -> None:
        self._scores = scores
        self._add_space_prefix = add_space_prefix
        self._remove_extra = remove_extra_whitespaces
        self._unknown = unknown_id
        self._ids: dict[str, int] = {}
        self._unused: set[str] = set()
        self._bytes: dict[int, int] = {}
        whole: dict[str, int] = {}
        glue: set[str] = set()
        for id_, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
            if kind in (PieceType.NORMAL, PieceType.UNUSED):
                self._ids[piece] = id_
                if kind == PieceType.UNUSED:
                    self._unused.add(piece)
                at = piece.find(SPACE, 1)
                while at > 0:
                    glue.add(piece[at - 1])
                    at = piece.find(SPACE, at + 1)
            elif kind == PieceType.USER_DEFINED:
                whole[piece.replace(" ", SPACE)] = id_
            elif kind == PieceType.BYTE and (byte := spm_byte(piece)) is not None:
                self._bytes[byte] = id_
        self._whole = LongestMatch(whole)
        self._boundary = _boundary(glue - {SPACE})
        self._kept_word = functools.lru_cache(CACHED_WORDS)(self._word)

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids. The prefix goes before every text, first or after a special token, as llama.cpp has it."""
        if self._remove_extra:
            # At the end a U+2581 that the user wrote counts as a space, elsewhere it does not.
            text = re.sub(" +", " ", text).lstrip(" ").rstrip(" " + SPACE)
        text = text.replace(" ", SPACE)
        if not text:
            return []
        if self._add_space_prefix:
            text = SPACE + text
        ids: list[int] = []
        done = 0
        for start, end, id_ in self._whole.finditer(text):
            self._encode_between(text[done:start], ids)
            ids.append(id_)
            done = end
        self._encode_between(text[done:], ids)
        return ids

    def _encode_between(self, text: str, ids: list[int]) -> None:
        """Append the ids of a stretch that holds no user-defined piece."""
        words = self._boundary.split(text) if self._boundary is not None else [text]
        for word in words:
            if not word:
                continue
            found = self._kept_word(word) if len(word) <= CACHED_CHARS else self._word(word)
            # A run of unknown characters is one unknown token, also across words.
            joins = ids and found and found[0] == self._unknown == ids[-1]
            ids.extend(found[1:] if joins else found)

    def _word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for symbol in self._merged(word):
            id_ = self._ids.get(symbol)
            if id_ is not None:
                ids.append(id_)
            elif self._bytes:
                ids.extend(self._byte_ids(symbol))
            elif not ids or ids[-1] != self._unknown:
                ids.extend(self._unknown_ids())
        return tuple(ids)

    def _byte_ids(self, symbol: str) -> Iterator[int]:
        for byte in symbol.encode():
            if byte in self._bytes:
                yield self._bytes[byte]
            else:
                yield from self._unknown_ids()

    def _unknown_ids(self) -> tuple[int, ...]:
        return () if self._unknown is None else (self._unknown,)

    def _merged(self, word: str) -> list[str]:
        """The word cut into pieces and single characters."""
        symbols = list(word)
        last = len(symbols) - 1
        after = [*range(1, last + 1), -1]
        before = list(range(-1, last))
        ids, scores, unused = self._ids, self._scores, self._unused
        parts: dict[str, tuple[str, str]] = {}
        queue: list[tuple[float, int, str]] = []

        def offer(left: int, right: int) -> None:
            union = symbols[left] + symbols[right]
            id_ = ids.get(union)
            if id_ is not None:
                heapq.heappush(queue, (-scores[id_], left, union))
                if union in unused:
                    parts[union] = (symbols[left], symbols[right])

        for left in range(last):
            offer(left, left + 1)
        while queue:
            _, left, union = heapq.heappop(queue)
            right = after[left]
            # Either side merged since: a symbol that is gone is empty, one that grew makes another length.
            if not symbols[left] or right < 0 or len(symbols[left]) + len(symbols[right]) != len(union):
                continue
            symbols[left], symbols[right] = union, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        found = [symbol for symbol in symbols if symbol]
        return [part for symbol in found for part in _cut(symbol, parts)] if parts else found


def _cut(symbol: str, parts: dict[str, tuple[str, str]]) -> Iterator[str]:
    """An unused piece back into the used ones it was merged from."""
    pair = parts.get(symbol)
    if pair is None:
        yield symbol
        return
    for part in pair:
        yield from _cut(part, parts)


def _boundary(glue: set[str]) -> re.Pattern[str] | None:
    """Where a text may be cut before encoding: before a space that no piece holds together with the character
    ahead of it. None when so many characters do that cutting is not worth it."""
    if len(glue) > MOST_GLUE:
        return None
    kept = "".join(re.escape(character) for character in sorted(glue))
    return re.compile(f"(?<=[^{SPACE}{kept}])(?={SPACE})")
