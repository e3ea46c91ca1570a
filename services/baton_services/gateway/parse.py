"""From a body's bytes to a typed request; what is wrong is said by the name of its field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from baton.protocol.errors import RequestError
from baton_services.gateway.errors import invalid
from baton_services.gateway.schema import IGNORED

MAX_EXPLAINED = 2**20  # bytes: a larger body that is not JSON is not read a second time to say where

T = TypeVar("T", bound=msgspec.Struct)

_at = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_lacks = re.compile(r"required field `([^`]+)`")
_surrogate = re.compile("[\ud800-\udfff]")


def parse(body: bytes, kind: type[T]) -> T:
    """A request body as its type.

    Raises:
        RequestError: not JSON, a field missing, of the wrong type or out of range; names the field.
    """
    if not body.strip():
        raise invalid("the body is empty: send a JSON object")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error)) from error
    except RecursionError as error:
        raise invalid("the body is not valid JSON for this API: it nests too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, str(error)) from error


def convert(value: Any, kind: type[T], place: str) -> T:
    """A piece of a decoded body as its type.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range; names it, from `place` on.
    """
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error), place) from error


def unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Names of top-level fields that are neither honoured nor known to be harmless.

    Raises:
        RequestError: a name is no text; `parse` does not look at those it does not know.
    """
    known = set(kind.__struct_fields__) | IGNORED
    try:
        raw: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, str(error)) from error
    return [name for name in raw if name not in known]


def _mistyped(words: str, within: str = "") -> RequestError:
    """From msgspec's words and path (`$.messages[0].role`, `[...]` for a mapping's value)."""
    place = _at.search(words)
    param = place.group(1).replace("[...]", "") if place else ""
    if within:
        param = f"{within}.{param}" if param and not param.startswith("[") else f"{within}{param}"
    words = _at.sub("", words)
    lacking = _lacks.search(words)
    if lacking is not None:
        param = f"{param}.{lacking.group(1)}" if param else lacking.group(1)
        words = "is required"
    return invalid(f"{param}: {words}" if param else f"the body: {words}", param or None)


def _not_json(body: bytes, words: str) -> RequestError:
    """Says which field holds what JSON, or Unicode, does not have: NaN, infinities, lone surrogates.

    Python's own reader takes those, so that they can be found; whatever else it takes is refused as well.
    """
    general = invalid(f"the body is not valid JSON: {words}")
    if len(body) > MAX_EXPLAINED:
        return general
    try:
        tree = json.loads(body, parse_constant=_NotANumber)
    except (ValueError, RecursionError):
        return general
    for place, value in _leaves(tree, ""):
        if isinstance(value, _NotANumber):
            return invalid(f"{place or 'the body'}: {value.name} is not a number in JSON", place or None)
        if isinstance(value, str) and _surrogate.search(value):
            text = "holds a lone surrogate (half of a UTF-16 pair), which is no character"
            return invalid(f"{place or 'the body'}: {text}", place or None)
    return general


class _NotANumber:
    def __init__(self, name: str) -> None:
        self.name = name


def _leaves(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in a decoded body that holds nothing else, keys included."""
    waiting: list[tuple[str, Any]] = [(place, tree)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                yield place, key
                name = _surrogate.sub("?", key[:64])
                waiting.append((f"{place}.{name}" if place else name, item))
        elif isinstance(value, list):
            waiting += ((f"{place}[{index}]", item) for index, item in enumerate(value))
        else:
            yield place, value
