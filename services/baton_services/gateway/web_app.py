"""What every HTTP answer shares: request ids, keys, limits, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton.protocol.errors import Code, Failure, RequestError
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway.errors import HttpError

log = get_logger(__name__)

REQUEST_ID = "request_id"  # ours
ECHO_ID = "echo_id"  # what the answer carries: the client's own, or ours
_client_id = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN = {"/health", "/ready"}  # probes carry no key


def request_ids() -> Middleware:
    """Gives each request our id; a client's own `x-request-id` is only echoed."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = uuid.uuid4().hex
        theirs = request.headers.get("x-request-id", "")
        request[ECHO_ID] = theirs if _client_id.fullmatch(theirs) else request[REQUEST_ID]
        response = await handler(request)
        if not response.prepared:
            response.headers["x-request-id"] = request[ECHO_ID]
        return response

    return middleware


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
        except web.HTTPRequestEntityTooLarge:
            limit = "the body is larger than gateway.max_body_mb allows"
            response = HttpError(413, limit, code="request_too_large").response()
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            words = f"{request.method} is not allowed on {request.path}, only {allowed}"
            response = HttpError(405, words, code="method_not_allowed", headers={"Allow": allowed}).response()
        except web.HTTPNotFound:
            response = HttpError(404, f"there is no {request.path} here", code="not_found").response()
        except web.HTTPException as error:
            response = HttpError(error.status, error.reason or "error").response()
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = HttpError(
                500, "the gateway failed on this request; its log has the reason", kind="server_error"
            ).response()
        resource = request.match_info.route.resource
        metrics.answers.labels(resource.canonical if resource else "other", str(response.status)).inc()
        return response

    return middleware


def keys(api_key: str) -> Middleware:
    """Asks for `Authorization: Bearer KEY`, if a key is set, on all but the probes."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and request.path not in _OPEN:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode(errors="surrogateescape"), api_key.encode()
            ):
                words = (
                    "a key is required: Authorization: Bearer KEY" if not given else "that key is not valid"
                )
                raise HttpError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return middleware


def busy(live: int, limit: int) -> None:
    """Refuses a request over the limit.

    Raises:
        RequestError: OVERLOADED.
    """
    if live >= limit:
        words = f"{live} requests are being served, the most that gateway.max_requests allows"
        raise RequestError(Failure(code=Code.OVERLOADED, message=words, retry_after_ms=1_000))
