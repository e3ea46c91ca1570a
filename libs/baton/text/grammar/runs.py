"""Runs of digits and of white space outside of JSON strings, which a grammar alone leaves unbounded."""

from __future__ import annotations

from baton.protocol.sampling import Constraint

MAX_DIGITS = 15  # what a double holds exactly
MAX_EXPONENT_DIGITS = 2
MAX_SPACES = 32

_DIGITS = frozenset(b"0123456789")
_SPACES = frozenset(b" \t\r\n")
_LINES = frozenset(b"\r\n")
_QUOTE, _BACKSLASH = b'"\\'
_EXPONENT, _NUMBER = frozenset(b"eE"), frozenset(b"+-")


class Runs:
    """Reads an output's bytes; counting begins where its JSON does."""

    def __init__(self, constraint: Constraint) -> None:
        self._skip = constraint.skip.encode()
        self._begin = constraint.begin.encode()
        self._tail = b""
        self._counting = not self._skip
        self._gap = False  # between the reasoning and the answer, bounded by the grammar
        self._in_string = self._escaped = self._exponent = False
        self._digits = self._spaces = self._lines = 0

    @property
    def digits_full(self) -> bool:
        """No further digit, if there is another way."""
        return self._digits >= (MAX_EXPONENT_DIGITS if self._exponent else MAX_DIGITS)

    @property
    def spaces_full(self) -> bool:
        return self._spaces >= MAX_SPACES

    @property
    def lines_full(self) -> bool:
        """No further line, as no lay-out of JSON has an empty one."""
        return self._lines > 0

    def push(self, data: bytes) -> None:
        if not self._counting:
            data = self._after_reasoning(data)
        if self._gap:
            data = data.lstrip()
            self._gap = not data
        for byte in data:
            self._take(byte)

    def _after_reasoning(self, data: bytes) -> bytes:
        text = self._tail + data
        if self._begin:
            whole = len(text) >= len(self._begin)
            if not self._begin.startswith(text[: len(self._begin)]):
                self._counting = True
                return text
            if not whole:
                self._tail = text
                return b""
            self._begin = b""
        at = text.find(self._skip)
        if at < 0:
            self._tail = text[-len(self._skip) :]
            return b""
        self._counting = self._gap = True
        return text[at + len(self._skip) :]

    def _take(self, byte: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif byte == _BACKSLASH:
                self._escaped = True
            elif byte == _QUOTE:
                self._in_string = False
            return
        after_digit = self._digits > 0
        self._digits = self._digits + 1 if byte in _DIGITS else 0
        self._spaces = self._spaces + 1 if byte in _SPACES else 0
        self._lines = self._lines + (byte in _LINES) if byte in _SPACES else 0
        if byte in _EXPONENT and after_digit:
            self._exponent = True
        elif byte not in _DIGITS and byte not in _NUMBER:
            self._exponent = False
        self._in_string = byte == _QUOTE
