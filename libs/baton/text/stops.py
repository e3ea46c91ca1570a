"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from baton.protocol.errors import Code, RequestError


class StopFilter:
    """Passes text on up to the first stop string, and never a part of one.

    The stop string that ends first wins, of those that end together the longest: the one that a reader of the
    stream sees complete first. So the outcome does not depend on how the text was cut into pieces. Each
    character costs the same (Knuth, Morris and Pratt, 1977).

    Attributes:
        hit: a stop string is complete. What is pushed afterwards is dropped.
        found: that stop string.
        consumed: characters taken in, up to the end of that stop string. The token whose text reaches this is
            the last one that counts; push token by token to know which it is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError.of(Code.INVALID_REQUEST, "a stop string is empty", param="stop")
        self._stops = list(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self.hit = False
        self.found = ""
        self.consumed = 0

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text that is safe to send, whether a stop string is complete). The text ends before the stop.

        Not `armed`, a stop string completed here is text like any other; one that only begins here may still
        be completed later, and is held back as ever.
        """
        if self.hit:
            return "", True
        if not self._stops:
            self.consumed += len(text)
            return text, False
        for number, character in enumerate(text, start=1):
            length = self._advance(character)
            if length and armed:
                self.hit = True
                self.consumed += number
                whole = self._held + text[:number]
                self.found = whole[len(whole) - length :]
                self._held = ""
                return whole[: len(whole) - length], True
        self.consumed += len(text)
        whole = self._held + text
        safe = len(whole) - max(map(self._open, range(len(self._stops))))
        self._held = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """At the end of the answer: what was held back, as no stop string can follow."""
        held, self._held = self._held, ""
        return held

    def _open(self, index: int) -> int:
        """How much of a stop string the text ends with that may yet be completed."""
        matched = self._matched[index]
        return self._borders[index][-1] if matched == len(self._stops[index]) else matched

    def _advance(self, character: str) -> int:
        """The length of the longest stop string that this character completes; 0 if none."""
        complete = 0
        for index, stop in enumerate(self._stops):
            matched, borders = self._open(index), self._borders[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = borders[length - 1]
        if text[position] == text[length]:
            length += 1
        borders[position] = length
    return borders
