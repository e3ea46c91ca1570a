"""JSON schemas as grammars: what comes out is valid, what cannot be kept is refused by name and place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from schemas import random_schema

from baton.protocol.request import Structure
from baton.text.grammar.compose import compose
from baton.text.grammar.open import open_compiler
from baton.text.grammar.schema import GrammarError, explain, prepare_schema
from baton.text.grammar.state import GrammarState
from baton.text.mock import mock_tokenizer

COMPILER = open_compiler(mock_tokenizer())
CLOSING = (34, 93, 125)  # what ends a string, a list, an object


def state_of(schema: Any) -> GrammarState:
    constraint = compose(Structure(kind="json_schema", text=json.dumps(schema)), None, None)
    assert constraint is not None
    return GrammarState(constraint, COMPILER)


def takes(schema: Any, text: str) -> bool:
    """Whether exactly this text can be the whole output."""
    state = state_of(schema)
    try:
        state.advance(list(text.encode()))
    except RuntimeError:
        return False
    return bool(state.words()[257 // 32] >> (257 % 32) & 1)  # EOS


def wander(state: GrammarState, seed: int, limit: int = 3_000) -> str | None:
    """A text drawn at random from what is allowed; None if it did not end in time."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while len(out) < limit:
        bits = np.unpackbits(state.words().view(np.uint8), bitorder="little")[:256]
        assert bits.any()
        weights = bits * rng.random(256)
        weights[list(CLOSING)] *= 20
        token = int(weights.argmax())
        state.advance([token])
        out.append(token)
        if state.complete:
            return bytes(out).decode()
    return None


@pytest.mark.parametrize("block", range(10))
def test_whatever_is_drawn_is_valid(block: int) -> None:
    """200 schemas, drawn from so wildly that only the grammar keeps the text in form."""
    finished = 0
    for seed in range(block * 20, block * 20 + 20):
        schema = random_schema(seed)
        text = wander(state_of(schema), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            finished += 1
    assert finished >= 18


def test_any_json_ends() -> None:
    for seed in range(20):
        text = wander(state_of({}), seed)
        assert text is not None
        json.loads(text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', "{}"),
        (
            {
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["age", "name"],
            },
            '{"name":"x","age":3}',
            '{"name":"x"}',
        ),
        (
            {"$ref": "#/$defs/N", "$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}}}},
            "[[],[[]]]",
            "[1]",
        ),
        (
            {
                "properties": {"p": {"$ref": "#/$defs/P", "description": "d"}},
                "$defs": {"P": {"type": "null"}},
            },
            '{"p":null}',
            '{"p":1}',
        ),
        ({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 7}, {"type": "null"}]}, "7", "8"),
        ({"enum": ["a b", 3, None]}, '"a b"', '"ab"'),
        ({"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, "[true]", "[]"),
        ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"x":1,"y":2}', '{"x":"1"}'),
    ],
)
def test_forms(schema: Any, good: str, bad: str) -> None:
    assert takes(schema, good)
    assert not takes(schema, bad)


def test_an_object_that_names_its_members_gets_no_others() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert not takes(schema, '{"a": 1, "b": 2}')
    assert takes({**schema, "additionalProperties": True}, '{"a": 1, "b": 2}')
    assert takes({**schema, "required": ["a", "b"]}, '{"a": 1, "b": 2}')


def test_combinations_are_left_open() -> None:
    """Closed, none of the two parts would let the other's member in."""
    one = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    assert takes({"allOf": [one, other]}, '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "properties.a: 'not' is not supported"),
        ({"type": "array", "uniqueItems": True}, "the schema: 'uniqueItems' is not supported"),
        ({"items": {"if": {}, "then": {}}}, "items: 'if' is not supported"),
        ({"$defs": {"X": {"propertyNames": {}}}, "$ref": "#/$defs/X"}, "$defs.X: 'propertyNames'"),
        ({"properties": {"z": {"type": "string", "format": "zip"}}}, "properties.z: format 'zip'"),
        (
            {"type": "array", "items": [{}], "additionalItems": False},
            "'additionalItems' is not supported; use",
        ),
        ({"$ref": "#/$defs/None"}, "/$defs/None"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        ([], "a JSON schema is an object"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name_and_place(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError) as refused:
        state_of(schema)
    assert words in explain(str(refused.value), json.dumps(schema))


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="nests more than"):
        prepare_schema(schema)


def test_options_of_llguidance_are_not_the_clients() -> None:
    assert prepare_schema({"type": "object", "x-guidance": {"lenient": True}}) == {"type": "object"}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}])
def test_a_schema_that_nothing_satisfies_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        state_of(schema)
