"""Calls as JSON behind a tag, or bare at the answer's start.

Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]   or   [TOOL_CALLS]name[ARGS]{...}
Llama 3        {"name": ..., "parameters": {...}}   with or without <|python_tag|>, several behind ";"
generic        {"name": ..., "arguments": {...}}    or a list of these
"""

from __future__ import annotations

import re
from collections.abc import Collection

from baton.text.tools.events import Begin, Event, Piece, Text
from baton.text.tools.scanner import CallScanner, Outcome, ValueScanner

_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,256})\s*(?:\[ARGS\])?\s*(?=\{)")
_PERHAPS_NAME = re.compile(r"\s*[A-Za-z0-9_.-]{0,256}\s*(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*")
_SPACE = " \t\r\n"


class TaggedReader:
    """Reads calls behind `tag`.

    Args:
        tag: begins a call, or a list of calls; "": there is none, calls are bare.
        end: ends it; it may be missing.
        names: the functions there are. A bare object that calls none of them is text.
        bare: an answer that begins with a call needs no tag.
        named: a name may stand before the arguments, outside of the JSON.
    """

    def __init__(
        self, tag: str, end: str = "", *, names: Collection[str], bare: bool = False, named: bool = False
    ) -> None:
        self._tag = tag
        self._end = end
        self._names = names
        self._bare = bare
        self._named = named
        self._where = "start"
        self._held = ""
        self._listed = False  # in a list of calls
        self._opening = ""  # what led to the call being read, for when it is none
        self._call: CallScanner | None = None
        self._value: ValueScanner | None = None  # the arguments of a call named outside of them
        self._called = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held:
            before = (self._where, len(self._held))
            events += self._step()
            if before == (self._where, len(self._held)):
                break
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._where not in ("start", "text"):
            held = self._unfinished(held)
        held = held.rstrip() if self._called else held
        return [Text(held)] if held else []

    def _unfinished(self, held: str) -> str:
        """What is text of a call that was cut off before it began: nothing behind a tag."""
        if self._called or (self._tag and self._tag in self._opening):
            return ""
        raw = self._call.raw if self._where == "call" and self._call is not None else held
        return "" if self._call is not None and self._call.begun else self._opening + raw

    def _step(self) -> list[Event]:
        match self._where:
            case "start":
                return self._at_start()
            case "text":
                return self._in_text()
            case "open":
                return self._opened()
            case "call":
                return self._in_call()
            case "arguments":
                return self._in_arguments()
        return self._after()

    def _at_start(self) -> list[Event]:
        """Nothing but white space so far."""
        begin = self._held.lstrip(_SPACE)
        if not begin:
            return []
        if self._bare and begin[0] in "{[" and not (self._tag and self._tag.startswith(begin[0])):
            self._opening, self._held = self._held[: -len(begin)], begin
            self._where = "open"
        else:
            self._where = "text"
        return []

    def _in_text(self) -> list[Event]:
        at = self._held.find(self._tag) if self._tag else -1
        if at >= 0:
            text = self._held[:at].rstrip(_SPACE)
            self._opening = self._held[len(text) : at + len(self._tag)]
            self._held = self._held[at + len(self._tag) :]
            self._where = "open"
        else:
            safe = len(self._held) - _overlap(self._held, self._tag)
            text = self._held[:safe].rstrip(_SPACE)
            self._held = self._held[len(text) :]
        return [Text(text)] if text else []

    def _opened(self) -> list[Event]:
        """Behind a tag: an object, a list of them, or a name."""
        begin = self._held.lstrip(_SPACE)
        if not begin:
            return []
        if begin[0] == "[" and not self._listed:
            self._opening += self._held[: len(self._held) - len(begin) + 1]
            self._held, self._listed = begin[1:], True
        elif begin[0] == "{":
            bare = not self._opening.strip(_SPACE + "[,;")
            self._call = CallScanner(self._names if bare else None)
            self._opening += self._held[: len(self._held) - len(begin)]
            self._held, self._where = begin, "call"
        elif self._named and (found := _NAME.match(self._held)):
            self._held, self._where, self._called = self._held[found.end() :], "arguments", True
            self._value = ValueScanner()
            return [Begin(found[1])]
        elif not (self._named and _PERHAPS_NAME.fullmatch(self._held)):
            return self._no_call("")
        return []

    def _in_call(self) -> list[Event]:
        call = self._call
        assert call is not None
        events: list[Event] = []
        for number, char in enumerate(self._held, start=1):
            events += call.push(char)
            if call.outcome is not Outcome.OPEN:
                self._held = self._held[number:]
                if call.outcome is Outcome.NO_CALL and not call.begun:
                    return self._no_call(call.raw)
                self._where, self._called = "after", True
                return events
        self._held = ""
        return events

    def _in_arguments(self) -> list[Event]:
        value = self._value
        assert value is not None
        for number, char in enumerate(self._held, start=1):
            value.push(char)
            if value.ended:
                piece, self._held = self._held[:number], self._held[number:]
                self._where = "after"
                return [Piece(piece)]
        piece, self._held = self._held, ""
        return [Piece(piece)]

    def _after(self) -> list[Event]:
        """Behind a call: the list goes on or ends, the end tag, another call, or text."""
        rest = self._held.lstrip(_SPACE)
        if not rest:
            return []
        if self._listed and rest[0] in ",]":
            self._listed = rest[0] == ","
            self._where = "open" if self._listed else "after"
            self._opening, self._held = "", rest[1:]
        elif self._bare and rest[0] == ";":
            self._opening, self._held, self._where = "", rest[1:], "open"
        elif self._end and rest.startswith(self._end):
            self._held, self._listed = rest[len(self._end) :].lstrip(_SPACE), False
        elif self._end and self._end.startswith(rest):
            return []
        else:
            self._where, self._listed = "text", False
        return []

    def _no_call(self, raw: str) -> list[Event]:
        """What looked like a call is text."""
        self._where, self._listed = "text", False
        opening, self._opening = self._opening, ""
        text = opening + raw
        return [Text(text)] if text else []


def _overlap(text: str, tag: str) -> int:
    """How much of the end of `text` may be the begin of `tag`."""
    longest = min(len(tag) - 1, len(text)) if tag else 0
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
