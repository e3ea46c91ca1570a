"""Keeps what users write from becoming special tokens, while templates handle it as the text it is.

Before rendering, each special token's text inside a user's string is replaced by one private-use character,
a mark; after rendering, once the template's own special tokens have been found, marks turn back into text. A
template may trim, cut, search and join around marks as it likes. Marks are characters of plane 16. A user's
own characters of that plane are marked as well, so none can be forged; templates that hold any are refused.
"""

from __future__ import annotations

import re
from typing import Any

from baton.protocol.errors import Code, RequestError
from baton.text.matching import LongestMatch
from baton.text.tokenizer import SpecialToken

_FIRST, _LAST = 0x100000, 0x10FFFD
_PLANE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST + 2)}]")
MAX_DEPTH = 32


def holds_marks(text: str) -> bool:
    return _PLANE.search(text) is not None


class Marks:
    """The marks of one conversation.

    Args:
        specials: the special tokens' texts.
        edges: further characters to mark, which cost a template its sight of them: with the first and last
            characters of every special token marked, no joining or cutting can form one.
    """

    def __init__(self, specials: LongestMatch[SpecialToken], edges: str = "") -> None:
        self._specials = specials
        self._edges = re.compile(f"[{re.escape(edges)}]") if edges else None
        self._mark_of: dict[str, str] = {}
        self._text_of: dict[str, str] = {}

    def protect(self, value: Any, depth: int = 0) -> Any:
        """A copy of strings, lists and mappings of strings with marks in them. Keys stay: they are names.

        Raises:
            RequestError: nested too deep, or more different marks than there are.
        """
        if isinstance(value, str):
            return self._protect_text(value)
        if depth > MAX_DEPTH:
            raise RequestError.of(
                Code.INVALID_REQUEST, f"messages and template arguments nest more than {MAX_DEPTH} deep"
            )
        if isinstance(value, dict):
            return {key: self.protect(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item, depth + 1) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Marks turned back into what they stand for."""
        if not self._text_of:
            return text
        return _PLANE.sub(lambda found: self._text_of.get(found[0], found[0]), text)

    def _protect_text(self, text: str) -> str:
        text = _PLANE.sub(lambda found: self._mark(found[0]), text)
        parts: list[str] = []
        done = 0
        for start, end, token in self._specials.finditer(text):
            parts += (text[done:start], self._mark(token.text))
            done = end
        text = "".join((*parts, text[done:])) if parts else text
        return self._edges.sub(lambda found: self._mark(found[0]), text) if self._edges else text

    def _mark(self, text: str) -> str:
        mark = self._mark_of.get(text)
        if mark is None:
            number = _FIRST + len(self._mark_of)
            if number > _LAST:
                raise RequestError.of(
                    Code.INVALID_REQUEST, "the text holds too many different private-use characters"
                )
            mark = self._mark_of[text] = chr(number)
            self._text_of[mark] = text
        return mark
