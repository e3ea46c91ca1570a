"""Failures -> statuses, headers and OpenAI's error object."""

from __future__ import annotations

import json

import pytest

from baton.protocol.errors import Code, Failure
from baton_services.gateway.errors import HttpError, internal


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_an_answer(code: Code) -> None:
    error = HttpError.of(Failure(code=code, message="why", param="p"))
    assert 400 <= error.status <= 599
    response = error.response()
    assert response.content_type == "application/json"
    body = json.loads(response.text or "")
    assert body == {"error": {"message": "why", "type": error.kind, "param": "p", "code": code.value}}
    assert (error.status in (429, 503)) == ("Retry-After" in response.headers)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.INVALID_REQUEST, 400),
        (Code.UNSUPPORTED, 400),
        (Code.CONTEXT_LENGTH, 400),
        (Code.MODEL_NOT_FOUND, 404),
        (Code.OVERLOADED, 429),
        (Code.NO_WORKER, 503),
        (Code.DRAINING, 503),
        (Code.DEADLINE, 504),
        (Code.INTERNAL, 500),
    ],
)
def test_the_map(code: Code, status: int) -> None:
    assert HttpError.of(Failure(code=code, message="why")).status == status


def test_retry_after_is_in_whole_seconds_and_in_milliseconds() -> None:
    headers = HttpError.of(Failure(code=Code.OVERLOADED, message="x", retry_after_ms=1_200)).headers
    assert headers == {"Retry-After": "2", "retry-after-ms": "1200"}


def test_words_with_half_a_character_can_be_sent() -> None:
    assert HttpError(404, "there is no /\udcff").body()["error"]["message"] == "there is no /?"


def test_our_own_failures_tell_nothing() -> None:
    assert internal().status == 500
    assert internal().body()["error"]["code"] == "internal_error"
