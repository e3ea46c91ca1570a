"""JSON schemas: refused by name and place where they cannot be kept, closed so that a small model ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_SCHEMA_DEPTH = 64
_LISTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")
# Validation keywords of some draft that llguidance passes over in silence.
_PASSED_OVER = {"additionalItems": "use prefixItems, and items: false", "$recursiveRef": "use $ref"}
# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = (
    *("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties")


class GrammarError(ValueError):
    """A schema, regex or grammar that cannot be kept; one line that names what and where."""


def prepare_schema(schema: Any) -> Any:
    """A copy of a schema as it goes to llguidance.

    An object that names its properties and says nothing of others gets no others: whatever then comes out is
    valid for the schema as given too, and a small model does not go on inventing members. Left open are
    objects that a combination (allOf, anyOf beside properties, a $ref with siblings) might extend.

    Raises:
        GrammarError: not a schema, nested too deep, or with a keyword that would be passed over in silence.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object")
    for place, part in walk(schema):
        for name, instead in _PASSED_OVER.items():
            if name in part:
                raise GrammarError(f"{place or 'the schema'}: {name!r} is not supported; {instead}")
    closed = not any(_combines(part) for _, part in walk(schema))
    return _copy(schema, closed)


def explain(problem: str, text: str) -> str:
    """llguidance's words, with the place in the schema (given as JSON) where that is known."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return problem
    listed, unknown = _LISTED.search(problem), _FORMAT.search(problem)
    if listed is not None:
        names = json.loads(f"[{listed[1]}]")
        for place, part in walk(schema):
            if (name := next((name for name in names if name in part), None)) is not None:
                return f"{place or 'the schema'}: {name!r} is not supported"
    if unknown is not None:
        for place, part in walk(schema):
            if part.get("format") == unknown[1].strip():
                return f"{place or 'the schema'}: format {part['format']!r} is not supported"
    return " ".join(problem.split())[:500]


def walk(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of every schema in a schema that is an object.

    Raises:
        GrammarError: nested too deep.
    """
    waiting: list[tuple[str, Any, int]] = [("", schema, 0)]
    while waiting:
        place, part, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError(f"the schema nests more than {MAX_SCHEMA_DEPTH} deep")
        if not isinstance(part, dict):
            continue
        yield place, part
        dot = "." if place else ""
        inside: list[tuple[str, Any]] = [(f"{place}{dot}{name}", part[name]) for name in _ONE if name in part]
        for name in (*_SEVERAL, "items"):
            if isinstance(part.get(name), list):
                inside += [(f"{place}{dot}{name}[{number}]", item) for number, item in enumerate(part[name])]
        for name in _NAMED:
            if isinstance(part.get(name), dict):
                inside += [(f"{place}{dot}{name}.{key}", item) for key, item in part[name].items()]
        waiting += [(where, item, depth + 1) for where, item in reversed(inside)]


def _combines(part: dict[str, Any]) -> bool:
    if "allOf" in part:
        return True
    if "$ref" in part and any(name in part for name in ("properties", "required", "additionalProperties")):
        return True
    return "properties" in part and any(name in part for name in _COMBINING)


def _copy(value: Any, closed: bool) -> Any:
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for name, item in value.items():
        if name == "x-guidance":  # llguidance's options: ours alone
            continue
        if name in _NAMED and isinstance(item, dict):
            out[name] = {key: _copy(part, closed) for key, part in item.items()}
        elif name in (*_SEVERAL, "items") and isinstance(item, list):
            out[name] = [_copy(part, closed) for part in item]
        elif name in _ONE:
            out[name] = _copy(item, closed)
        else:
            out[name] = item
    if closed and _may_close(out):
        out["additionalProperties"] = False
    return out


def _may_close(part: dict[str, Any]) -> bool:
    properties = part.get("properties")
    if not isinstance(properties, dict) or not properties or "additionalProperties" in part:
        return False
    required = part.get("required", [])
    if not isinstance(required, list):
        return False
    if any(not isinstance(name, str) or name not in properties for name in required):
        return False
    return "minProperties" not in part and "maxProperties" not in part
