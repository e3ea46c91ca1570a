"""One tool call as a JSON object, read character by character: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from baton.text.tools.events import Begin, Event, Piece

_SPACES = frozenset(" \t\r\n")
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
MAX_HELD = 64 * 1024  # characters of a call whose name has not come yet


class Outcome(enum.Enum):
    OPEN = "open"
    DONE = "done"
    NO_CALL = "no call"  # `raw` is then plain text


class ValueScanner:
    """Finds the end of one JSON value, without checking more of it than brackets and strings."""

    def __init__(self) -> None:
        self.text = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._scalar = False

    def push(self, char: str) -> bool:
        """Whether `char` belongs to the value; False: the value has ended before it."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            if self.ended:
                return False
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
        elif self._depth == 0:
            if char in ",}]" or char in _SPACES:
                return False
            self._scalar = True
        self.text += char
        return True

    @property
    def ended(self) -> bool:
        """Whether the value is complete by itself (a string, object or list)."""
        return bool(self.text) and not (self._in_string or self._depth or self._scalar)


class CallScanner:
    """Reads one call; begins it once its name is known, then passes its arguments on as they come.

    Args:
        names: a call of any other function is no call; None: any name is one.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._where = "start"
        self._key = ""
        self._value = ValueScanner()
        self._name = ""
        self._waiting = ""  # arguments before the name
        self._has_arguments = False
        self.begun = False
        self.raw = ""
        self.outcome = Outcome.OPEN

    def push(self, char: str) -> list[Event]:
        """Takes the next character, while the outcome is open."""
        self.raw += char
        events = self._take(char)
        if self.outcome is Outcome.OPEN and not self.begun and len(self.raw) > MAX_HELD:
            self.outcome = Outcome.NO_CALL
        return events

    def _take(self, char: str) -> list[Event]:
        if self._where == "value":
            return self._in_value(char)
        if char in _SPACES and not (self._where == "key" and self._value.text):
            return []
        match self._where:
            case "start" if char == "{":
                self._where = "key"
            case "key" if char == "}" and not self._value.text:
                return self._end()
            case "key" if char == '"' or self._value.text:
                self._value.push(char)
                if self._value.ended:
                    self._key, self._value, self._where = _string(self._value.text), ValueScanner(), "colon"
            case "colon" if char == ":":
                self._where = "value"
            case "comma" if char == ",":
                self._where = "key"
            case "comma" if char == "}":
                return self._end()
            case _:
                self.outcome = Outcome.NO_CALL
        return []

    def _in_value(self, char: str) -> list[Event]:
        if not self._value.text and char in _SPACES:
            return []
        first = not self._value.text
        if self._value.push(char):
            streams = self._key in _ARGUMENTS and self._value.text[0] == "{"
            events = self._arguments(char, first) if streams else []
            return events + self._value_ended() if self._value.ended else events
        events = self._value_ended()
        if self.outcome is Outcome.OPEN:
            events += self._take(char)
        return events

    def _value_ended(self) -> list[Event]:
        text, key = self._value.text, self._key
        self._value, self._where = ValueScanner(), "comma"
        if key in _NAMES and not self._name and text.startswith('"'):
            return self._named(_string(text))
        if key in _ARGUMENTS and not text.startswith("{"):
            whole = _string(text) if text.startswith('"') else text
            return self._arguments("{}" if whole in ("", "null") else whole, True)
        return []

    def _named(self, name: str) -> list[Event]:
        if not name or (self._names is not None and name not in self._names):
            self.outcome = Outcome.NO_CALL
            return []
        self._name, self.begun = name, True
        waiting, self._waiting = self._waiting, ""
        return [Begin(name), *([Piece(waiting)] if waiting else [])]

    def _arguments(self, text: str, first: bool) -> list[Event]:
        if first and self._has_arguments:
            self.outcome = Outcome.NO_CALL if not self.begun else Outcome.DONE
            return []
        self._has_arguments = True
        if self.begun:
            return [Piece(text)]
        self._waiting += text
        return []

    def _end(self) -> list[Event]:
        self.outcome = Outcome.DONE if self.begun else Outcome.NO_CALL
        return [Piece("{}")] if self.begun and not self._has_arguments else []


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
