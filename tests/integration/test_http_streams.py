"""Server-sent events as they go over the wire, and what a client that leaves sets free."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from openai_types import ChatCompletion, ChatCompletionChunk, Completion, strict
from rawhttp import connect, head, parse_answer, read_answer, reset, send
from running import Running
from sse import check_stream, comments, read_chunks

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "8", "--router-local-prefill-tokens", "0",
    "--mock-step-us", "2000", "--mock-token-us", "100", "--metrics-interval-ms", "200",
    "--gateway-stalled-s", "2",
)  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Grüße! 😀"}]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("streams"), *FLAGS) as running:
        yield running
        assert "Traceback" not in running.log


def stream(baton: Running, path: str, body: dict[str, Any], **headers: str) -> bytes:
    raw = json.dumps({"model": "mock", "stream": True, "temperature": 0, **body}).encode()
    answer = send(baton.url, "POST", path, raw, headers)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"]
    return dechunk(answer.body)


def dechunk(body: bytes) -> bytes:
    """The body of chunked transfer encoding, which must be complete."""
    out = bytearray()
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        out += body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
        if not length:
            assert not body
            return bytes(out)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_chat_streams(baton: Running, counted: bool, logprobs: bool, n: int) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "n": n, "seed": 1, "temperature": 1.0}
    body |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    body |= {"stream_options": {"include_usage": True}} if counted else {}
    chunks = read_chunks(stream(baton, CHAT, body))
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    choices = check_stream(chunks, chat=True)
    assert set(choices) == set(range(n))
    whole = strict(ChatCompletion, baton.post(CHAT, {**body, "model": "mock", "stream_options": None})[1])
    for index, choice in choices.items():
        assert choice.text == whole.choices[index].message.content
        assert choice.finish == whole.choices[index].finish_reason == "length"
        assert choice.tokens == (choice.text.encode() if logprobs else b"")
    assert whole.usage and whole.usage.completion_tokens == 12 * n
    assert bool(chunks[-1]["choices"]) != counted
    if counted:
        told = chunks[-1]["usage"]
        assert (told["completion_tokens"], told["prompt_tokens"]) == (12 * n, whole.usage.prompt_tokens)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_completion_streams(baton: Running, logprobs: int | None) -> None:
    body: dict[str, Any] = {"prompt": ["a", "bc"], "max_tokens": 9, "logprobs": logprobs}
    chunks = read_chunks(stream(baton, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}))
    choices = check_stream(chunks, chat=False)
    whole = strict(Completion, baton.post(COMPLETIONS, {**body, "model": "mock", "temperature": 0})[1])
    assert [choices[index].text for index in (0, 1)] == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        told = choice.logprobs
        if logprobs is None:
            assert told is None
            continue
        assert told and "".join(told.tokens or []) == choice.text
        assert told.text_offset == list(range(9))
        assert (told.top_logprobs is None) == (logprobs == 0)


def test_where_the_time_went_is_told_to_who_asks(baton: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3}
    assert not comments(stream(baton, CHAT, body))
    (comment,) = comments(stream(baton, CHAT, body, **{"x-baton-timing": "1"}))
    timing = json.loads(comment.removeprefix("timing "))
    assert timing["decode_ms"] > 0 and timing["decode_worker"] == "decode-0"


def test_an_error_before_the_first_token_is_a_status(baton: Running) -> None:
    body = {"model": "mock", "prompt": "x" * 40_000, "stream": True}
    answer = send(baton.url, "POST", COMPLETIONS, json.dumps(body).encode())
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert answer.error["code"] == "context_length_exceeded"


def test_an_error_after_it_is_one_event_and_the_end(tmp_path: Any) -> None:
    slow = ("--gateway-request-timeout-s", "1", "--mock-step-us", "30000")
    with Running(tmp_path, *FLAGS, *slow) as baton:
        raw = stream(baton, COMPLETIONS, {"prompt": "endless", "max_tokens": 5_000})
        *chunks, last = read_chunks(raw, whole=False)
        assert len(chunks) > 3 and all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert last["error"]["code"] == "deadline_exceeded"
        assert not raw.endswith(b"[DONE]\n\n")
        answer = baton.post(COMPLETIONS, {"model": "mock", "prompt": "endless", "max_tokens": 5_000})
        assert (answer[0], answer[1]["error"]["code"]) == (504, "deadline_exceeded")


# --- clients that leave ------------------------------------------------------------------------------


def busy(baton: Running) -> dict[str, float]:
    """Everything that still holds something."""
    names = ("baton_kv_blocks_used", "baton_requests_running", "baton_requests_waiting")
    return {name: value for name, value in baton.metrics().items() if name.startswith(names) and value}


def wait_free(baton: Running) -> float:
    """Seconds until nothing is held, as the figures tell, which travel every 0.2 s."""
    began = time.monotonic()
    while left := busy(baton):
        assert time.monotonic() - began < 5.0, left
        time.sleep(0.05)
    return time.monotonic() - began


def wait_busy(baton: Running, name: str, role: str) -> None:
    deadline = time.monotonic() + 5
    while not baton.total(name, role=role):
        assert time.monotonic() < deadline, baton.metrics()
        time.sleep(0.05)


def ask(baton: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and does not wait for the answer."""
    raw = json.dumps({"model": "mock", "temperature": 0, **body}).encode()
    connection = connect(baton.url)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(raw))}
    connection.sendall(head("POST", path, headers) + raw)
    return connection


LONG = {"prompt": [120] * 20_000, "max_tokens": 10}  # 2 s of reading
ENDLESS = {"prompt": "go on", "max_tokens": 8_000}
LEAVING: list[Callable[[socket.socket], None]] = [socket.socket.close, reset]


@pytest.mark.parametrize(
    ("body", "role", "leave"),
    [
        (LONG, "prefill", socket.socket.close),
        ({**LONG, "stream": True}, "prefill", reset),
        (ENDLESS, "decode", reset),
        ({**ENDLESS, "stream": True}, "decode", socket.socket.close),
        ({**ENDLESS, "stream": True, "n": 4}, "decode", reset),
    ],
)
def test_a_client_that_leaves_frees_all(
    baton: Running, body: dict[str, Any], role: str, leave: Callable[[socket.socket], None]
) -> None:
    """While its prompt is read (the handler waits for the first token), and while its answer is written."""
    connection = ask(baton, COMPLETIONS, body)
    wait_busy(baton, "baton_requests_running", role)
    leave(connection)
    assert wait_free(baton) < 3.0  # 1 s, the figures' way, and a busy machine


def test_clients_that_leave_a_queue_free_all(baton: Running) -> None:
    """Six prompts of which the pool holds one: the others wait, at the router or in a worker."""
    connections = [ask(baton, COMPLETIONS, {**LONG, "prompt": [97 + index] * 20_000}) for index in range(6)]
    deadline = time.monotonic() + 5
    while sum(baton.total("baton_requests_waiting", role=role) for role in ("router", "prefill")) < 3:
        assert time.monotonic() < deadline, baton.metrics()
        time.sleep(0.05)
    for connection, leave in zip(connections, LEAVING * 3, strict=True):
        leave(connection)
    assert wait_free(baton) < 3.0


async def test_clients_that_leave_at_any_time_free_all(baton: Running) -> None:
    """Before the tokenizer has answered, in queues, prefill, hand-off and decode: 40 of them, at random."""
    rng = random.Random(4)

    async def one(index: int) -> None:
        body = {"prompt": [97 + index % 26] * rng.randrange(10, 3_000), "max_tokens": 2_000, "stream": True}
        connection = await asyncio.to_thread(ask, baton, COMPLETIONS, body)
        await asyncio.sleep(rng.choice([0.0, 0.002, 0.01, 0.05, 0.3, 0.8]) * rng.random())
        rng.choice(LEAVING)(connection)

    await asyncio.gather(*(one(index) for index in range(40)))
    assert await asyncio.to_thread(wait_free, baton) < 3.0
    assert baton.post(COMPLETIONS, {"model": "mock", "prompt": "x", "max_tokens": 1})[0] == 200


def test_a_client_that_leaves_amid_its_body_is_no_request(baton: Running) -> None:
    with connect(baton.url) as connection:
        connection.sendall(head("POST", CHAT, {"Content-Type": "application/json", "Content-Length": "100"}))
        connection.sendall(b'{"model"')
    assert not busy(baton)
    assert baton.get("/health")[0] == 200


def test_one_connection_serves_many(baton: Running) -> None:
    body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    with connect(baton.url) as connection:
        for _ in range(3):
            connection.sendall(head("POST", COMPLETIONS, headers) + body)
            raw = connection.recv(65_536)
            assert parse_answer(raw).status == 200
        connection.sendall(head("GET", "/health", {"Connection": "close"}))
        assert read_answer(connection).status == 200


# --- the page ----------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_outside_and_may_do_nothing_else(baton: Running) -> None:
    answer = send(baton.url, "GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    html = answer.body.decode()
    assert not re.search(r"https?://|//[a-z]|\son[a-z]+=|javascript:|innerHTML|\seval\(", html)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\sstyle=", html)


def test_the_cluster_is_told(baton: Running) -> None:
    status, body = baton.get("/cluster")
    assert (status, body["models"]) == (200, ["mock"])
    roles = {service["role"] for service in body["services"]}
    assert {"gateway", "tokenizer", "router", "prefill", "decode", "metrics"} <= roles
    decode = next(service for service in body["services"] if service["role"] == "decode")
    assert decode["state"] == "ready" and decode["load"]["blocks_total"] > 0


class _Fast:
    """A client that reads all it is sent, and how long that took."""

    def __init__(self, baton: Running, seed: int) -> None:
        self.seconds = 0.0
        self._baton, self._seed = baton, seed
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        began = time.monotonic()
        body = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "seed": self._seed}
        check_stream(read_chunks(stream(self._baton, CHAT, body)), chat=True)
        self.seconds = time.monotonic() - began


def all_read(baton: Running) -> float:
    """The slowest of twenty."""
    clients = [_Fast(baton, seed) for seed in range(20)]
    for client in clients:
        client.thread.join(60)
        assert client.seconds
    return max(client.seconds for client in clients)


def test_a_client_that_takes_nothing_delays_nobody_and_is_cut_off(baton: Running) -> None:
    alone = all_read(baton)
    body = {
        "model": "mock", "messages": MESSAGES, "stream": True, "max_tokens": 1_500, "n": 8,
        "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    raw = json.dumps(body).encode()
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        parsed = urllib.parse.urlparse(baton.url)
        stalled.connect((parsed.hostname, parsed.port))
        headers = {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        stalled.sendall(head("POST", CHAT, headers) + raw)
        began = time.monotonic()
        beside = all_read(baton)
        assert beside < 3 * alone + 2, f"{beside:.2f} s, and {alone:.2f} s without it"
        while "took nothing for 2 s, cut off" not in baton.log:
            assert time.monotonic() - began < 30
            time.sleep(0.1)
        stalled.settimeout(10)
        taken = bytearray()
        with suppress(ConnectionError):
            while piece := stalled.recv(2**20):
                taken += piece
        assert taken and b"[DONE]" not in taken
    while running_sequences(baton):
        assert time.monotonic() - began < 40
        time.sleep(0.1)


def running_sequences(baton: Running) -> int:
    _, cluster = baton.get("/cluster")
    loads = [service["load"] for service in cluster["services"] if service["role"] in ("prefill", "decode")]
    return sum(load["running"] + load["waiting"] for load in loads)
