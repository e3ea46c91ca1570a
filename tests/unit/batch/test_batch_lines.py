"""A batch's input: lines are cut and checked alike however the bytes come, and each error names its line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.batch import lines
from baton.batch.lines import Checker, Splitter

ENDPOINT = "/v1/chat/completions"


def one(custom_id: Any = "a", *, method: Any = "POST", url: Any = ENDPOINT, **body: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode()


def check(
    *raw: bytes | None, models: list[str] | None = None, served: tuple[str, ...] = ("m", "n")
) -> Checker:
    checker = Checker(ENDPOINT, models, frozenset(served))
    for number, line in enumerate(raw, 1):
        checker.check(number, line)
    return checker


def cut(data: bytes, sizes: list[int]) -> list[bytes | None]:
    splitter, found, position = Splitter(), [], 0
    for size in sizes:
        found += splitter.feed(data[position : position + size])
        position += size
    found += splitter.feed(data[position:])
    return [*found, *splitter.end()]


@given(st.lists(st.binary(max_size=30)), st.lists(st.integers(0, 20)))
def test_lines_do_not_depend_on_how_the_bytes_come(parts: list[bytes], sizes: list[int]) -> None:
    data = b"\n".join(parts)
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert cut(data, sizes) == expected


def test_a_line_that_is_too_long_is_dropped_as_it_comes() -> None:
    splitter, chunk = Splitter(), b"x" * 2**20
    found = list(splitter.feed(b"first\n"))
    for _ in range(200):
        found += splitter.feed(chunk)
        assert len(splitter._rest) <= lines.MAX_LINE + len(chunk)
    found += splitter.feed(b"\nlast")
    assert [*found, *splitter.end()] == [b"first", None, b"last"]


def test_a_good_line() -> None:
    checker = check(one("a"), one("b", temperature=0), one("ü" * 512))
    assert checker.errors == []
    assert (checker.count, checker.model) == (3, "m")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (None, "line_too_long", "7 MB"),
        (b"hello", "invalid_json_line", "JSON"),
        (b'{"custom_id": "a"', "invalid_json_line", "truncated"),
        (b"[1]", "invalid_request", "object"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", "JSON"),
        (b'{"custom_id": "\\ud800", "method": "POST"}', "invalid_json_line", "JSON"),
        (b'{"method": "POST", "url": "/v1/x", "body": {}}', "invalid_request", "custom_id"),
        (b'{"custom_id": 1, "method": "POST", "url": "/v1/x", "body": {}}', "invalid_request", "custom_id"),
        (one(""), "invalid_custom_id", "custom_id"),
        (one("x" * 513), "invalid_custom_id", "custom_id"),
        (one(method="GET"), "invalid_method", "POST"),
        (one(url="/v1/completions"), "mismatched_url", "/v1/chat/completions"),
        (one(url="http://evil/v1/chat/completions"), "mismatched_url", "url"),
        (one(model="other"), "mismatched_model", "'other'"),
        (one(model=3), "invalid_request", "body"),
        (one(stream=True), "invalid_request", "streamed"),
        (one(background=True), "invalid_request", "background"),
        (
            b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":[]}',
            "invalid_request",
            "body",
        ),
        (
            b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"x":1}}',
            "missing_required_parameter",
            "body.model",
        ),
        (
            b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":'
            + b'{"a":' * 100_000
            + b"1"
            + b"}" * 100_000
            + b"}",
            "invalid_json_line",
            "",
        ),
    ],
)
def test_a_line_that_cannot_be_run_is_named_with_the_reason(
    line: bytes | None, code: str, words: str
) -> None:
    checker = check(one("good"), line)
    [error] = checker.errors
    assert (error.line, error.code) == (2, code)
    assert words in error.message
    assert len(error.message) < 400


def test_a_custom_id_twice_and_a_second_model() -> None:
    checker = check(one("a"), one("b"), one("a"), one("c", model="n"))
    assert [(error.line, error.code) for error in checker.errors] == [
        (3, "duplicate_custom_id"),
        (4, "mismatched_model"),
    ]


def test_a_model_that_is_not_there() -> None:
    [error] = check(one("a", model="other")).errors
    assert (error.code, error.line) == ("model_not_found", 1)
    assert "m, n" in error.message


def test_a_model_that_the_key_may_not_ask() -> None:
    assert [error.code for error in check(one("a"), models=["n"]).errors] == ["model_not_allowed"]


def test_no_more_lines_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    checker = check(*(one(str(i)) for i in range(4)))
    assert [(error.line, error.code) for error in checker.errors] == [(4, "too_many_lines")]


def test_errors_are_collected_up_to_a_limit() -> None:
    checker = check(*(b"x" for _ in range(1_000)))
    assert len(checker.errors) == lines.MAX_ERRORS
