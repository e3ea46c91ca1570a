"""What a model's text says: reasoning, text for the user, and tool calls, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from baton.protocol.request import CallDelta
from baton.text.reasoning import ReasoningReader
from baton.text.tools.events import Begin, CallReader, Event, Piece, Text


@dataclass(slots=True)
class Parts:
    """What a piece of an answer adds."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.text + other.text, self.reasoning + other.reasoning, self.calls + other.calls)


class Reader:
    """Reads one answer; all parts joined do not depend on how it was cut into pieces.

    Args:
        request: whose answer it is; calls' ids follow from it, so that a replay gives the same.
        parallel: False: what comes after the first call is dropped.

    Attributes:
        written, reasoned: characters of text and of reasoning that are out.
        called: at least one call has begun.
    """

    def __init__(
        self,
        request: str,
        *,
        reasoning: ReasoningReader | None = None,
        calls: CallReader | None = None,
        parallel: bool = True,
        id_chars: int = 24,
    ) -> None:
        self._request = request
        self._reasoning = reasoning
        self._reader = calls
        self._parallel = parallel
        self._id_chars = id_chars
        self._lengths: list[int] = []  # characters of each call's arguments
        self._closed = False  # one call is all there may be, and it is over
        self.written = 0
        self.reasoned = 0

    @property
    def called(self) -> bool:
        return bool(self._lengths)

    @property
    def reasons(self) -> bool:
        """Whether the answer has begun to reason and not ended yet."""
        return self._reasoning is not None and self._reasoning.under_way

    @property
    def called_so_far(self) -> int:
        """Calls begun, plus characters of their arguments that are out."""
        return len(self._lengths) + sum(self._lengths)

    def push(self, text: str) -> Parts:
        """What this text adds."""
        reasoning, text = self._reasoning.push(text) if self._reasoning else ("", text)
        return self._parts(reasoning, self._events(text))

    def finish(self) -> Parts:
        """At the end of the answer: what was held back."""
        reasoning, text = self._reasoning.finish() if self._reasoning else ("", "")
        events = self._events(text)
        return self._parts(reasoning, events + (self._reader.finish() if self._reader else []))

    def _events(self, text: str) -> list[Event]:
        if self._reader is not None and text:
            return self._reader.push(text)
        return [Text(text)] if text else []

    def _parts(self, reasoning: str, events: list[Event]) -> Parts:
        parts = Parts(reasoning=reasoning)
        self.reasoned += len(reasoning)
        for event in events:
            if self._lengths and not self._parallel and not isinstance(event, Piece):
                self._closed = True
            if self._closed:
                continue
            match event:
                case Text(text):
                    parts.text += text
                    self.written += len(text)
                case Begin(name):
                    index = len(self._lengths)
                    self._lengths.append(0)
                    parts.calls.append(CallDelta(index, self._id(index), name, "", 0))
                case Piece(text):
                    self._add(parts.calls, text)
        return parts

    def _add(self, calls: list[CallDelta], text: str) -> None:
        index = len(self._lengths) - 1
        if index < 0:
            return
        start = self._lengths[index]
        self._lengths[index] += len(text)
        if calls and calls[-1].index == index:
            calls[-1].arguments += text
        else:
            calls.append(CallDelta(index, "", "", text, start))

    def _id(self, index: int) -> str:
        digest = xxhash.xxh3_128_hexdigest(f"{self._request}:{index}".encode())
        short = digest[: self._id_chars]
        return short if self._id_chars < 24 else f"call_{short}"
