"""Why a request was refused or failed: one vocabulary for all services.

The gateway alone maps a code to an HTTP status (`baton_services.gateway.errors`).
"""

from __future__ import annotations

import enum

from baton.protocol.base import Part


class Code(enum.StrEnum):
    """A machine-readable cause. Its value is what the client reads as `error.code`."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED = "unsupported_parameter"
    CONTEXT_LENGTH = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    OVERLOADED = "server_is_overloaded"  # a queue is full: try again later
    NO_WORKER = "no_worker_available"
    DEADLINE = "deadline_exceeded"
    DRAINING = "server_is_draining"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"  # the tokenizer replays; seen by a client only when no worker is left
    TRANSFER_FAILED = "kv_transfer_failed"
    DECODE_FULL = "decode_full"
    FINGERPRINT = "fingerprint_mismatch"
    STALE = "stale_attempt"  # of an attempt or epoch that is over
    BUS_LOST = "message_bus_lost"
    MALFORMED = "malformed_message"
    INTERNAL = "internal_error"


class Failure(Part):
    """One refusal or failure, in words a client may read. Never holds another request's data."""

    code: Code
    message: str
    param: str | None = None
    retry_after_ms: int | None = None


class RequestError(Exception):
    """Raised where a request cannot go on; carries the `Failure` that its owner will report."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    @classmethod
    def of(cls, code: Code, message: str, *, param: str | None = None) -> RequestError:
        return cls(Failure(code=code, message=message, param=param))
