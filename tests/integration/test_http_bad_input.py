"""Whatever a client sends: a specific 4xx in OpenAI's error shape, and the next request works."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rawhttp import Answer, connect, head, parse_answer, read_answer, send
from running import Running

from baton_services.gateway.schema import ChatRequest

FLAGS = ("--engine", "mock", "--kv-memory-mb", "8", "--mock-step-us", "500", "--mock-token-us", "1")
CHAT = "/v1/chat/completions"
OK = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
OK_BODY = json.dumps(OK).encode()


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("bad-input"), *FLAGS) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def url(baton: Running) -> Iterator[str]:
    yield baton.url
    assert send(baton.url, "POST", CHAT, OK_BODY).status == 200


def chat(url: str, **fields: Any) -> Answer:
    return send(url, "POST", CHAT, json.dumps({**OK, **fields}).encode())


def raw(body: str) -> bytes:
    return b'{"model": "mock", "messages": [{"role": "user", "content": "x"}], ' + body.encode() + b"}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{nope", None),
        (b"[1]", None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "mock"}', "messages"),
        (raw('"temperature": NaN'), "temperature"),
        (raw('"temperature": 1e999'), "temperature"),
        (raw('"stop": "\\ud800"'), "stop"),
        (raw('"max_tokens": ' + "9" * 5_000), "max_tokens"),
        (raw('"max_tokens": 0'), "max_tokens"),
        (raw('"max_tokens": -1'), "max_tokens"),
        (raw('"n": ' + "[" * 100_000 + "]" * 100_000), "n"),
        (raw('"unknown": ' + "[" * 100_000 + "]" * 100_000), None),
        (raw('"chat_template_kwargs": ' + '{"a":' * 20 + "1" + "}" * 20), "chat_template_kwargs"),
        (raw('"chat_template_kwargs": {"messages": []}'), "chat_template_kwargs"),
        (raw('"stop": ' + json.dumps(["a"] * 10_000)), "stop"),
        (raw('"logit_bias": {"99999": 1}'), "logit_bias"),
        (raw('"stop_token_ids": [99999]'), "stop_token_ids"),
    ],
)
def test_bodies(url: str, body: bytes, param: str | None) -> None:
    answer = send(url, "POST", CHAT, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "x" * 40_000}], "messages"),
    ],
)
def test_messages(url: str, messages: Any, param: str) -> None:
    answer = chat(url, messages=messages)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_prompt_that_is_too_long_says_so(url: str) -> None:
    answer = chat(url, messages=[{"role": "user", "content": "x" * 7_000_000}])
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    tokens = {"model": "mock", "prompt": [0] * 2_700_000}  # more than a message on the bus may hold
    answer = send(url, "POST", "/v1/completions", json.dumps(tokens, separators=(",", ":")).encode())
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_an_unknown_model(url: str) -> None:
    answer = chat(url, model="gpt-9\n")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_nulls_everywhere_are_as_nothing(url: str) -> None:
    nulls = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"model", "messages", "max_tokens"})
    assert chat(url, **nulls).status == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"]
)
def test_other_content_types(url: str, kind: str) -> None:
    answer = send(url, "POST", CHAT, OK_BODY, {"Content-Type": kind})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_type")


def test_methods(url: str) -> None:
    for path in (CHAT, "/v1/completions", "/chat/completions"):
        answer = send(url, "GET", path)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert "POST" in answer.headers["allow"]
        options = send(url, "OPTIONS", path)
        assert (options.status, options.body) == (204, b"")
        assert "POST" in options.headers["allow"]
    assert send(url, "DELETE", "/v1/models").status == 405
    head_of = send(url, "HEAD", "/v1/models")
    assert (head_of.status, head_of.body) == (200, b"")


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/nope", "/v1/models/", "//v1/models", "/%ff", "/v1/models/a/b%2Fc"]
)
def test_other_paths(url: str, path: str) -> None:
    answer = send(url, "GET", path)
    assert answer.status == 404
    assert answer.error["code"] in ("not_found", "model_not_found")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http(url: str, request_bytes: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(request_bytes)
        assert parse_answer(connection.recv(65_536)).status == 400


def test_a_body_that_is_not_encoded_as_it_says(url: str) -> None:
    answer = send(url, "POST", CHAT, OK_BODY, {"Content-Encoding": "gzip"})
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


def test_chunked_bodies(url: str) -> None:
    pieces = [OK_BODY[start : start + 7] for start in range(0, len(OK_BODY), 7)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    assert send(url, "POST", CHAT, body, {"Transfer-Encoding": "chunked"}).status == 200


def test_a_body_that_comes_slowly(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(head("POST", CHAT, {**JSON, "Content-Length": str(len(OK_BODY))}))
        for start in range(0, len(OK_BODY), 10):
            time.sleep(0.02)
            connection.sendall(OK_BODY[start : start + 10])
        assert read_answer(connection).status == 200


JSON = {"Content-Type": "application/json", "Connection": "close"}
HUGE = 50 * 2**20


def test_50_mb_are_refused_before_they_are_read(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(head("POST", CHAT, {**JSON, "Content-Length": str(HUGE)}))
        answer = parse_answer(connection.recv(65_536))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    with connect(url) as connection:  # and who asks first is not told to go on
        asked = {**JSON, "Content-Length": str(HUGE), "Expect": "100-continue"}
        connection.sendall(head("POST", CHAT, asked))
        assert parse_answer(connection.recv(65_536)).status == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_50_mb_all_the_same_reads_the_413(url: str, chunked: bool) -> None:
    """And no connection reset: the rest is taken and dropped while the answer is on its way."""
    size = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(HUGE)}
    megabyte = b"100000\r\n" + b"x" * 2**20 + b"\r\n" if chunked else b"x" * 2**20
    with connect(url) as connection:
        reader = _Reader(connection)
        connection.sendall(head("POST", CHAT, {**JSON, **size}))
        for _ in range(50):
            connection.sendall(megabyte)
        answer = reader.answer()
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


class _Reader(threading.Thread):
    """Reads while the test still writes."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection, self._raw = connection, bytearray()
        self.start()

    def run(self) -> None:
        while chunk := self._connection.recv(65_536):
            self._raw += chunk

    def answer(self) -> Answer:
        self._connection.shutdown(socket.SHUT_WR)
        self.join(15)
        assert not self.is_alive()
        return parse_answer(bytes(self._raw))


def test_keys_and_draining(tmp_path: Any) -> None:
    with Running(tmp_path, *FLAGS, environ={"BATON_GATEWAY_API_KEY": "sesame"}) as baton:
        _asks_for_its_key(baton)
        _ends_what_it_has_begun(baton)


def _asks_for_its_key(baton: Running) -> None:
    """Of all but probes and the page."""
    answers = [
        send(baton.url, "POST", CHAT, OK_BODY, {"Authorization": value})
        for value in ("", "Bearer", "Bearer wrong", "Basic sesame", "Bearer \xe9", "bearer sesame")
    ]
    assert [answer.status for answer in answers] == [401, 401, 401, 401, 401, 200]
    assert answers[0].error["code"] == "invalid_api_key"
    assert answers[0].headers["www-authenticate"] == "Bearer"
    for path, status in (
        ("/health", 200),
        ("/ready", 200),
        ("/", 200),
        ("/v1/models", 401),
        ("/metrics", 401),
    ):
        assert send(baton.url, "GET", path).status == status


def _ends_what_it_has_begun(baton: Running) -> None:
    """Told to stop, it serves its stream to the end and refuses what is new."""
    key = {"Authorization": "Bearer sesame"}
    body = json.dumps({**OK, "stream": True, "max_tokens": 3_000, "ignore_eos": True}).encode()
    with connect(baton.url) as connection:
        length = {"Content-Length": str(len(body))}
        connection.sendall(head("POST", CHAT, {**JSON, **key, **length}) + body)
        begun = connection.recv(65_536)
        baton.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while send(baton.url, "GET", "/ready").status == 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        refused = send(baton.url, "POST", CHAT, OK_BODY, key)
        assert (refused.status, refused.error["code"]) == (503, "server_is_draining")
        assert refused.headers["retry-after"] == "1"
        rest = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert parse_answer(begun).status == 200
    assert b"data: [DONE]" in rest
