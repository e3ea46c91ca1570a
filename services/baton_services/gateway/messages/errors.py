"""Errors in Anthropic's shape, for whatever goes wrong below `/v1/messages`."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton_services.gateway.web_app import ECHO_ID

Json = dict[str, Any]

OVERLOADED = 529  # Anthropic's own status for what others call 503
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
    504: "timeout_error",
}


class _Words(msgspec.Struct):
    """What both shapes have in common."""

    message: str


class _Told(msgspec.Struct):
    """An error in OpenAI's shape, as everything inside of `shaped` answers."""

    error: _Words


def status_of(status: int) -> int:
    """Anthropic's status for one of ours."""
    return OVERLOADED if status == 503 else status


def kind_of(status: int) -> str:
    """The `type` of an error."""
    status = status_of(status)
    return _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error(status: int, message: str, request_id: str) -> Json:
    """The body of an error, and the data of an error event."""
    told = {"type": kind_of(status), "message": message}
    return {"type": "error", "error": told, "request_id": request_id}


def is_ours(request: web.Request) -> bool:
    return request.path.removeprefix("/v1").startswith("/messages")


def shaped() -> Middleware:
    """Gives the errors of inner middlewares and handlers Anthropic's shape."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if response.status < 400 or not isinstance(response, web.Response) or not is_ours(request):
            return response
        if response.prepared or not isinstance(response.body, bytes):
            return response
        words = msgspec.json.decode(response.body, type=_Told).error.message
        response.body = msgspec.json.encode(error(response.status, words, request[ECHO_ID]))
        response.set_status(status_of(response.status))
        return response

    return middleware


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Anthropic's clients look for the request's id in a header of this name."""
    if is_ours(request):
        response.headers["request-id"] = request[ECHO_ID]
