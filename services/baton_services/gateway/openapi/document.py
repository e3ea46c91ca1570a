"""The document, made of the very types that requests are checked with."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

import baton
from baton_services.gateway.messages.errors import OVERLOADED
from baton_services.gateway.openapi.operations import JSON, OPERATIONS, Operation

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_FORM: Json = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "const": "batch"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
}


class OpenApi:
    """The handler of `/openapi.json`; the document is made when it is first asked for."""

    def __init__(self) -> None:
        self._body = b""

    async def show(self, _: web.Request) -> web.Response:
        self._body = self._body or msgspec.json.encode(document())
        return web.Response(body=self._body, content_type=JSON)


def document() -> Json:
    """The whole specification."""
    kinds = _kinds()
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    references = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": baton.__version__,
            "description": "Each path below /v1 also answers without it.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # A key only where the gateway was given some.
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _kinds() -> list[type[Struct]]:
    """Every type that is named, once."""
    found: dict[type[Struct], None] = {}
    for operation in OPERATIONS:
        named = (operation.body, *operation.gives.values(), operation.failure)
        found |= dict.fromkeys(kind for kind in named if kind is not None)
    return list(found)


def _operation(operation: Operation, references: dict[type[Struct], Json]) -> Json:
    content: Json = {
        name: {"schema": {"type": ["object", "string"]} if kind is None else references[kind]}
        for name, kind in operation.gives.items()
    }
    responses: Json = {
        str(status): {"description": _phrase(status), "content": content} for status in (200, *operation.also)
    }
    failure = {JSON: {"schema": references[operation.failure]}}
    for status in sorted(set(operation.errors)):
        responses[str(status)] = {"description": _phrase(status), "content": failure}
    out: Json = {"summary": operation.summary, "operationId": _name(operation), "responses": responses}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in operation.query.items()
    ]
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": {JSON: {"schema": references[operation.body]}}}
    if operation.file:
        out["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    if operation.open:
        out["security"] = []
    return out


def _phrase(status: int) -> str:
    return "Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase


def _name(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path.removeprefix("/v1"))
    return "_".join([operation.method, *words]).replace("openapi_json", "openapi")
