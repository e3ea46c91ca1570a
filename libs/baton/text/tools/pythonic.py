"""Calls as Python writes them, in one list at the answer's start: `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Collection
from typing import Any

from baton.text.tools.events import Begin, Event, Piece, Text

_JSON_WORDS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
MAX_VALUE = 256 * 1024  # characters of one argument


class PythonicReader:
    """Arguments go out one by one, each when it is complete."""

    def __init__(self, *, names: Collection[str], tags: tuple[str, str] = ("", "")) -> None:
        self._names = names
        self._begin, self._end = tags
        self._where = "start"
        self._held = ""
        self._raw = ""  # since the last thing that went out
        self._count = 0  # arguments of this call
        self._called = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held:
            before = (self._where, len(self._held), self._count)
            events += self._step()
            if before == (self._where, len(self._held), self._count):
                break
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._raw + self._held, ""
        if self._called and self._where != "text":
            return []
        return [Text(held)] if held else []

    def _step(self) -> list[Event]:
        match self._where:
            case "start":
                return self._at_start()
            case "name":
                return self._in_name()
            case "argument":
                return self._in_argument()
            case "next":
                return self._between()
            case "done":
                rest = self._held.lstrip()
                if not rest or (self._end and self._end.startswith(rest)):
                    return []
                self._held = rest.removeprefix(self._end) if self._end else rest
                self._where = "text"
                return []
        text, self._held = self._held, ""
        return [Text(text)]

    def _at_start(self) -> list[Event]:
        rest = self._held.lstrip()
        if not rest or (self._begin and len(rest) < len(self._begin) and self._begin.startswith(rest)):
            return []
        rest = rest.removeprefix(self._begin).lstrip() if self._begin else rest
        if not rest:
            return []
        if rest[0] != "[":
            self._where = "text"
            return []
        self._raw, self._held, self._where = self._held[: len(self._held) - len(rest) + 1], rest[1:], "name"
        return []

    def _in_name(self) -> list[Event]:
        rest = self._held.lstrip()
        found = _NAME.match(rest)
        if found is None or (found.end() < len(rest) and rest[found.end()] != "("):
            return self._no_call() if rest else []
        if found.end() == len(rest):
            return self._no_call() if len(rest) > 256 else []
        if found[0] not in self._names:
            return self._no_call()
        self._raw, self._held, self._where = "", rest[found.end() + 1 :], "argument"
        self._count, self._called = 0, True
        return [Begin(found[0])]

    def _in_argument(self) -> list[Event]:
        end = _end_of(self._held)
        if end < 0:
            return self._cut() if len(self._held) > MAX_VALUE else []
        part, closes = self._held[:end].strip(), self._held[end] == ")"
        self._held = self._held[end + 1 :]
        events: list[Event] = []
        if part:
            name, equals, value = part.partition("=")
            known, found = _literal(value.strip())
            if not (equals and known):
                return self._cut()
            before = "{" if not self._count else ", "
            events.append(
                Piece(f"{before}{json.dumps(name.strip())}: {json.dumps(found, ensure_ascii=False)}")
            )
            self._count += 1
        if closes:
            events.append(Piece("}" if self._count else "{}"))
            self._where = "next"
        return events

    def _between(self) -> list[Event]:
        rest = self._held.lstrip()
        if not rest:
            return []
        self._held, self._where = rest[1:], {",": "name", "]": "done"}.get(rest[0], "text")
        return []

    def _cut(self) -> list[Event]:
        """An argument that is no literal: the call ends here, as it is."""
        self._held, self._where = "", "done"
        return [Piece("}" if self._count else "{}")]

    def _no_call(self) -> list[Event]:
        if self._called:
            self._held, self._where = "", "done"
            return []
        raw, self._raw, self._where = self._raw, "", "text"
        return [Text(raw)] if raw else []


def _end_of(text: str) -> int:
    """Where the first argument ends: its comma or the bracket of the call; -1: not yet."""
    depth, quote, escaped = 0, "", False
    for index, char in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}" and depth:
            depth -= 1
        elif depth == 0 and char in ",)":
            return index
    return -1


def _literal(text: str) -> tuple[bool, Any]:
    """(whether it is one, its value): JSON, or a Python literal."""
    with contextlib.suppress(ValueError, RecursionError):
        return True, json.loads(text)
    try:
        tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(_Words().visit(tree))
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False, None
    return True, value


class _Words(ast.NodeTransformer):
    """JSON's words amid Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node
