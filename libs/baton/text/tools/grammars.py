"""Tool calls as grammars, in the way each family writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from baton.protocol.request import Tool
from baton.text.grammar.compose import Calls, Piece, quote
from baton.text.grammar.schema import GrammarError, prepare_schema

MAX_CALLS = 16  # of one answer: a small model would go on for ever


def json_calls(
    tools: Sequence[Tool],
    parallel: bool,
    required: bool,
    *,
    arguments: str = "arguments",
    around: tuple[str, str] = ("", ""),
    between: str = "",
    whole: tuple[str, str] = ("", ""),
) -> Calls:
    """Calls as JSON objects.

    Args:
        parallel: more than one call may come.
        arguments: the key of the arguments.
        around: texts before and after each call; `whole`: before the first and after the last.
        between: text between two calls.
    """
    made = Calls("", required=required)
    for index, tool in enumerate(tools):
        made.pieces[f"arguments_{index}"] = _schema_piece(tool)
        head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
        made.rules.append(f"call_{index}: {quote(head)} @arguments_{index} {quote('}')}")
    one = " | ".join(f"call_{index}" for index in range(len(tools)))
    made.rules.append(f"one: {_text(around[0])} ({one}) {_text(around[1])}")
    made.rule = _sequence(between, whole, parallel)
    return made


def named_calls(tools: Sequence[Tool], parallel: bool, required: bool, *, tag: str, separator: str) -> Calls:
    """Calls whose name stands before their arguments: tag, name, separator, JSON."""
    made = Calls("", required=required)
    for index, tool in enumerate(tools):
        made.pieces[f"arguments_{index}"] = _schema_piece(tool)
        made.rules.append(f"call_{index}: {quote(tag + tool.name + separator)} @arguments_{index}")
    made.rules.append("one: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    made.rule = _sequence("", ("", ""), parallel)
    return made


def python_calls(tools: Sequence[Tool], parallel: bool, required: bool) -> Calls:
    """Calls as Python writes them, their values as JSON, required arguments first."""
    made = Calls("", required=required)
    for index, tool in enumerate(tools):
        schema = parameters(tool)
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        kept = {name: part for name, part in schema.items() if name in ("$defs", "definitions")}
        needed = [name for name in properties if name in schema.get("required", [])]
        others = [name for name in properties if name not in needed]
        rules = []
        for number, name in enumerate([*needed, *others]):
            part = prepare_schema(properties[name])
            piece = {**kept, **part} if isinstance(part, dict) else part
            made.pieces[f"value_{index}_{number}"] = {"json_schema": piece}
            made.rules.append(f"argument_{index}_{number}: {quote(name + '=')} @value_{index}_{number}")
            rules.append(f"argument_{index}_{number}")
        body = _arguments(rules[: len(needed)], rules[len(needed) :])
        made.rules.append(f"call_{index}: {quote(tool.name + '(')} {body} {quote(')')}")
    made.rules.append("one: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    made.rule = _sequence(", ", ("[", "]"), parallel)
    return made


def triggered(calls: Calls, tag: str) -> Calls:
    """Free text in which each `tag` begins a call that keeps to its schema. `calls` has nothing around it."""
    escaped = "".join(f"\\{char}" if char in "[]|/" else char for char in tag)
    calls.rules += [f"trigger[lazy]: /(?s:.*){escaped}/", f"led: trigger {calls.rule}"]
    calls.rule = "led+"
    return calls


def parameters(tool: Tool) -> dict[str, Any]:
    """A tool's parameters as a schema of an object; none named: an empty one.

    Raises:
        GrammarError: they are none.
    """
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = json.loads(tool.parameters)
    if not isinstance(schema, dict):
        raise GrammarError("parameters are a JSON schema, an object")
    if not schema.get("properties") and not {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & set(
        schema
    ):
        return {"additionalProperties": False, **schema, "type": "object"}
    return {"type": "object", **schema} if "$ref" not in schema else schema


def _schema_piece(tool: Tool) -> Piece:
    return {"json_schema": prepare_schema(parameters(tool))}


def _sequence(between: str, whole: tuple[str, str], parallel: bool) -> str:
    more = f" ({_text(between)} one){{0,{MAX_CALLS - 1}}}" if parallel else ""
    return f"{_text(whole[0])} one{more} {_text(whole[1])}"


def _arguments(needed: list[str], others: list[str]) -> str:
    comma = quote(", ")
    if needed:
        return f" {comma} ".join(needed) + "".join(f" ({comma} {rule})?" for rule in others)
    ways = [
        first + "".join(f" ({comma} {rule})?" for rule in others[number + 1 :])
        for number, first in enumerate(others)
    ]
    return f"({' | '.join(ways)})?" if ways else ""


def _text(text: str) -> str:
    return quote(text) if text else ""
