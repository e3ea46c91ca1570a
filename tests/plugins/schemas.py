"""JSON schemas made at random, of what the grammars support, small enough for a small model to fill in."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "kind", "tags", "score", "active", "note", "parent", "items", "größe", "a b")


def random_schema(seed: int) -> dict[str, Any]:
    """An object schema; now and then with $defs, recursion, a union, or an open object."""
    rng = random.Random(seed)
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        schema["$defs"] = {"Part": _object(rng, 1), "Node": _node(rng)}
        schema["properties"]["part"] = {"$ref": "#/$defs/Part", "description": "a sibling of $ref"}
        if rng.random() < 0.5:
            schema["properties"]["node"] = {"$ref": "#/$defs/Node"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.8]
    rng.shuffle(required)
    schema: dict[str, Any] = {
        "type": "object",
        "title": "Made",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": required,
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _node(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "v": {"type": "integer", "minimum": 0, "maximum": rng.choice((1, 9, 120))},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]},
        },
        "required": ["v", "next"],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _enum, _const, _boolean, _union]
    if depth < 3:
        makers += [_array, _array, _object_in]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 8},
            {"type": "string", "pattern": "^[a-z]{1,6}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "maxLength": 20},
        ]
    )


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": 0, "multipleOf": rng.choice((2, 5, 10))},
        ]
    )


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "number"}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1.5}])


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 'quo"ted', 3, None, True, "größer"], 3)}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, {"a": [1, 2]}])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_integer(rng, depth), {"type": "null"}, _string(rng, depth)]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _value(rng, depth + 1),
        "minItems": low,
        "maxItems": low + rng.randint(1, 2),
    }


def _object_in(rng: random.Random, depth: int) -> dict[str, Any]:
    return _object(rng, depth)
