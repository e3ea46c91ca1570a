"""The form that a client wants the answer in: `response_format`, or peers' names for guided decoding."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.protocol.request import Structure
from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.schema import Common, ResponseFormat

_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_STYLE = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "backend")


def structure(request: Common) -> Structure | None:
    """The one form asked for; None if the answer is free.

    Raises:
        RequestError: a form that is not known, more than one, or one of the wrong type.
    """
    found: list[Structure] = []
    if request.response_format is not None:
        asked = _response_format(request.response_format)
        found += [asked] if asked is not None else []
    for name, kind in _KINDS.items():
        value = getattr(request, f"guided_{name}")
        if value is not None:
            found.append(_guided(kind, value, f"guided_{name}"))
    if request.structured_outputs is not None:
        found += _structured_outputs(request.structured_outputs)
    if len(found) > 1:
        names = " and ".join(asked.param.split(".")[0] for asked in found[:2])
        raise invalid(f"{found[1].param}: an answer has one form, not {names} both", found[1].param)
    return found[0] if found else None


def _response_format(asked: ResponseFormat) -> Structure | None:
    param = "response_format"
    match asked.type:
        case "text":
            return None
        case "json_object":
            if asked.schema is not None:
                return _guided("json_schema", asked.schema, f"{param}.schema")
            return Structure(kind="json_object", param=param)
        case "json_schema":
            if asked.json_schema is None:
                raise invalid(f"{param}.json_schema: is required", f"{param}.json_schema")
            schema = asked.json_schema.schema
            schema = {"type": "object"} if schema is None else schema
            return _guided("json_schema", schema, f"{param}.json_schema.schema")
    raise unsupported(
        f"{param}: {asked.type[:40]!r} is not supported, only 'text', 'json_object' and 'json_schema'", param
    )


def _structured_outputs(value: Any) -> list[Structure]:
    param = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(f"{param}: must be an object", param)
    found = []
    for name, item in value.items():
        if item is None or name in _STYLE or (name == "json_object" and item is False):
            continue
        if name == "json_object" and item is True:
            found.append(Structure(kind="json_object", param=f"{param}.json_object"))
        elif name in _KINDS:
            found.append(_guided(_KINDS[name], item, f"{param}.{name}"))
        else:
            raise unsupported(f"{param}.{name[:40]}: is not supported", f"{param}.{name[:40]}")
    return found


def _guided(kind: str, value: Any, param: str) -> Structure:
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise invalid(f"{param}: must be a list of strings, at least one", param)
        return Structure(kind=kind, choices=value, param=param)
    if kind == "json_schema" and not isinstance(value, str):
        if not isinstance(value, dict | bool):
            raise invalid(f"{param}: must be a JSON schema", param)
        value = msgspec.json.encode(value).decode()
    if not isinstance(value, str) or not value.strip():
        raise invalid(f"{param}: must be a string, and not empty", param)
    return Structure(kind=kind, text=value, param=param)
