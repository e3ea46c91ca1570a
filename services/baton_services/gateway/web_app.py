"""What every HTTP answer shares: request ids, and errors in OpenAI's shape."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton.protocol.errors import RequestError
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway import limits
from baton_services.gateway.cors import Cors
from baton_services.gateway.errors import HttpError, internal, refused

log = get_logger(__name__)

REQUEST_ID = "request_id"  # ours
ECHO_ID = "echo_id"  # what the answer carries: the client's own, or ours
_client_id = re.compile(r"[\x21-\x7e]{1,128}")


def request_ids() -> Middleware:
    """Gives each request our id; a client's own `x-request-id` is only echoed."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = uuid.uuid4().hex
        theirs = request.headers.get("x-request-id", "")
        request[ECHO_ID] = theirs if _client_id.fullmatch(theirs) else request[REQUEST_ID]
        response = await handler(request)
        if request[ECHO_ID] != request[REQUEST_ID]:
            log.info(
                "%s %s",
                request.method,
                request.path,
                extra={"request": request[REQUEST_ID], "client_id": theirs, "status": response.status},
            )
        return response

    return middleware


def common_headers(cors: Cors) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """What every answer carries, streams and errors as well; for `Application.on_response_prepare`."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-request-id"] = request[ECHO_ID]
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Server"] = "baton"
        response.headers.update(limits.headers(request))
        response.headers.update(cors.headers(request))

    return add


def errors(metrics: GatewayMetrics) -> Middleware:
    """Turns everything that goes wrong before an answer begins into OpenAI's error shape."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except HttpError as error:
            response = error.response()
        except RequestError as error:
            response = HttpError.of(error.failure).response()
        except web.HTTPMethodNotAllowed as error:
            response = _wrong_method(request, error)
        except web.HTTPNotFound:
            response = _not_found(request)
        except web.HTTPException as error:
            response = HttpError(error.status, error.reason or "error").response()
        except ConnectionError:
            raise  # the client has gone; aiohttp ends the connection
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = internal().response()
        resource = request.match_info.route.resource
        metrics.answers.labels(resource.canonical if resource else "other", str(response.status)).inc()
        return response

    return middleware


def _wrong_method(request: web.Request, error: web.HTTPMethodNotAllowed) -> web.StreamResponse:
    allowed = ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))
    if request.method == "OPTIONS":
        return web.Response(status=204, headers={"Allow": allowed})
    words = f"{request.method} is not allowed on {request.path}, only {allowed}"
    return refused("method_not_allowed", words, headers={"Allow": allowed}).response()


def _not_found(request: web.Request) -> web.StreamResponse:
    if request.method == "OPTIONS" and request.rel_url.raw_path == "*":
        return web.Response(status=204, headers={"Allow": "GET, HEAD, OPTIONS, POST"})
    words = f"there is no {request.method} {request.path[:200]} here"
    return refused("not_found", words).response()
