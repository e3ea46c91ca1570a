"""Finding any of many strings in a text: leftmost first, of those the longest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class LongestMatch(Generic[T]):
    """The strings of a mapping, found in texts. Linear in the text for a handful of lengths.

    Some vocabularies have thousands of special tokens that all start with "<": an alternation of a regular
    expression would try each of them at every "<" of a text, this tries each length once.
    """

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._entries = {text: value for text, value in entries.items() if text}
        lengths: dict[str, set[int]] = {}  # by the first two characters
        for text in self._entries:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        firsts = "".join(re.escape(first) for first in sorted({start[0] for start in lengths}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def finditer(self, text: str) -> Iterator[tuple[int, int, T]]:
        """(start, end, value) of each match, from left to right, none overlapping another."""
        if self._first is None:
            return
        search = self._first.search
        found = search(text)
        while found is not None:
            start = found.start()
            end = start + self._length_at(text, start)
            if end > start:
                yield start, end, self._entries[text[start:end]]
            found = search(text, max(end, start + 1))

    def _length_at(self, text: str, start: int) -> int:
        """The length of the longest entry that begins here; 0 if none does."""
        for length in self._lengths.get(text[start : start + 2], ()):
            if text[start : start + length] in self._entries:
                return length
        return 1 if text[start] in self._entries else 0
