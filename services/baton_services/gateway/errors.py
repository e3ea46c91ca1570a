"""From a failure to what an OpenAI client sees: status, headers and body. The one place that maps."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.protocol.errors import Code, Failure, RequestError

_STATUS: dict[Code, tuple[int, str]] = {
    Code.INVALID_REQUEST: (400, "invalid_request_error"),
    Code.UNSUPPORTED: (400, "invalid_request_error"),
    Code.CONTEXT_LENGTH: (400, "invalid_request_error"),
    Code.MODEL_NOT_FOUND: (404, "invalid_request_error"),
    Code.OVERLOADED: (429, "rate_limit_error"),
    Code.NO_WORKER: (503, "service_unavailable_error"),
    Code.DRAINING: (503, "service_unavailable_error"),
    Code.BUS_LOST: (503, "service_unavailable_error"),
    Code.WORKER_LOST: (503, "service_unavailable_error"),
    Code.TRANSFER_FAILED: (503, "service_unavailable_error"),
    Code.DECODE_FULL: (503, "service_unavailable_error"),
    Code.DEADLINE: (504, "timeout_error"),
    Code.CANCELLED: (499, "cancelled"),
}
# What only the gateway says: code -> status and type.
OWN: dict[str, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "invalid_api_key": (401, "invalid_request_error"),
    "model_not_allowed": (403, "invalid_request_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "response_not_found": (404, "invalid_request_error"),
    "previous_response_not_found": (400, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "request_timeout": (408, "invalid_request_error"),
    "request_too_large": (413, "invalid_request_error"),
    "unsupported_content_type": (415, "invalid_request_error"),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "store_unavailable": (503, "service_unavailable_error"),
    "no_metrics": (503, "service_unavailable_error"),
    "no_batch_service": (503, "service_unavailable_error"),
    "conflict": (409, "invalid_request_error"),
}
_RETRY_AFTER_S = {429: 1, 503: 1}


class HttpError(Exception):
    """An answer that is an error. `code` and `param` are what the client reads in the body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers or {}

    @classmethod
    def of(cls, failure: Failure) -> HttpError:
        status, kind = _STATUS.get(failure.code, (500, "server_error"))
        headers = {}
        if status in _RETRY_AFTER_S:
            milliseconds = failure.retry_after_ms or _RETRY_AFTER_S[status] * 1000
            headers["Retry-After"] = str(max(1, -(-milliseconds // 1000)))
            headers["retry-after-ms"] = str(milliseconds)
        return cls(
            status,
            failure.message,
            kind=kind,
            code=failure.code.value,
            param=failure.param,
            headers=headers,
        )

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object: all four members are always there."""
        words = self.message.encode(errors="replace").decode()  # a path or header may hold lone surrogates
        return {"error": {"message": words, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.body()),
            content_type="application/json",
            headers=self.headers,
        )


def refused(
    code: str, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
) -> HttpError:
    """A refusal of the gateway's own, by its code in `OWN`."""
    status, kind = OWN[code]
    again = {"Retry-After": "1"} if status == 503 else {}
    return HttpError(status, message, kind=kind, code=code, param=param, headers={**again, **(headers or {})})


def internal() -> HttpError:
    """A 500 that tells the client nothing of our insides."""
    words = "the gateway failed on this request; its log has the reason"
    return HttpError(500, words, kind="server_error", code=Code.INTERNAL.value)


def invalid(message: str, param: str | None = None) -> RequestError:
    """A 400 about `param`."""
    return RequestError.of(Code.INVALID_REQUEST, message, param=param)


def unsupported(message: str, param: str) -> RequestError:
    """A 400 about a field that Baton knows and does not honour."""
    return RequestError.of(Code.UNSUPPORTED, message, param=param)
