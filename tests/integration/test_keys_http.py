"""API keys and their limits over two real gateways of one cluster."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running import BATON, Running

from baton.config.environ import to_environ
from baton.config.keys import KeyEntry, add, digest, remove
from baton.config.settings import Settings

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "8", "--mock-step-us", "2000", "--mock-token-us", "1",
    "--cors", "https://app.example",
)  # fmt: skip
CHAT = "/v1/chat/completions"
KEYS: dict[str, dict[str, Any]] = {
    "free": {},
    "requests": {"requests_per_minute": 20},
    "tokens": {"tokens_per_minute": 1_000},
    "tokens-at-once": {"tokens_per_minute": 1_000},
    "few": {"concurrent": 2},
    "leaves": {"concurrent": 1, "tokens_per_minute": 5_000},
    "other": {"models": ["another"]},
    "ours": {"models": ["mock", "another"], "requests_per_minute": 100, "tokens_per_minute": 90_000},
    "revoked": {},
}


class Cluster:
    """A Baton and one more gateway of it."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.keys = keys
        self.baton = Running(folder, *FLAGS, "--keys-file", str(keys))
        self._log = folder / "second.log"
        settings = Settings(bus=self.baton.bus)
        settings.gateway.port, settings.gateway.keys_file = 0, str(keys)
        settings.gateway.idle_s = 2
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        with self._log.open("wb") as log:
            self.second = subprocess.Popen(
                [*BATON, "serve", "gateway", "--id", "gateway-second"],
                env={**clean, **to_environ(settings)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.urls = [self.baton.url, self._second_url()]

    @property
    def log(self) -> str:
        return self.baton.log + self._log.read_text()

    def _second_url(self) -> str:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found = re.search(r"listening on (http://\S+)", self._log.read_text())
            if found:
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    def stop(self) -> None:
        self.second.terminate()
        self.second.wait(20)
        self.baton.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.toml"
    for name, limits in KEYS.items():
        add(keys, name, KeyEntry(sha256=digest(f"secret-{name}"), **limits))
    running = Cluster(folder, keys)
    time.sleep(1.5)  # both gateways, and the tokenizer, are known to each other
    yield running
    running.stop()
    assert "Traceback" not in running.log
    assert "secret-" not in running.log


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **fields}


def as_key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer secret-{name}"}


async def ask(
    http: aiohttp.ClientSession, url: str, key: str, **fields: Any
) -> tuple[int, Any, dict[str, str]]:
    async with http.post(url + CHAT, json=body(**fields), headers=as_key(key)) as answer:
        return answer.status, await answer.json(), {k.lower(): v for k, v in answer.headers.items()}


async def test_requests_a_minute_hold_over_both(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    answers = await asyncio.gather(*(ask(http, cluster.urls[number % 2], "requests") for number in range(60)))
    assert Counter(status for status, _, _ in answers) == {200: 20, 429: 40}
    _, told, headers = next(answer for answer in answers if answer[0] == 429)
    assert told["error"]["code"] == "rate_limit_exceeded" and told["error"]["type"] == "rate_limit_error"
    assert headers["x-ratelimit-limit-requests"] == "20"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(headers["retry-after"]) <= 61
    assert re.fullmatch(r"1m[01](\.\d+)?s|\d+(\.\d+)?s", headers["x-ratelimit-reset-requests"])
    assert "x-ratelimit-limit-tokens" not in headers
    left = sorted(
        int(headers["x-ratelimit-remaining-requests"]) for status, _, headers in answers if status == 200
    )
    assert left == list(range(20))


@pytest.mark.parametrize(("key", "at_once"), [("tokens", 1), ("tokens-at-once", 12)])
async def test_tokens_a_minute_hold_over_both(
    cluster: Cluster, http: aiohttp.ClientSession, key: str, at_once: int
) -> None:
    """The tokens there really were, not those that were asked for."""
    used = 0
    for turn in range(40):
        asked = [
            ask(
                http,
                cluster.urls[(turn + number) % 2],
                key,
                max_tokens=50,
                stop=["a"],
                seed=turn * 99 + number,
            )
            for number in range(at_once)
        ]
        answers = await asyncio.gather(*asked)
        assert {status for status, _, _ in answers} <= {200, 429}
        used += sum(told["usage"]["total_tokens"] for status, told, _ in answers if status == 200)
        if all(status == 429 for status, _, _ in answers):
            break
    else:
        raise AssertionError("it is never refused")
    assert 850 <= used <= 1_100


async def test_an_answer_that_never_fits_is_refused_for_good(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, told, headers = await ask(http, cluster.urls[0], "tokens", max_tokens=1_001)
    assert (status, headers["x-should-retry"]) == (429, "false")
    assert "ask for fewer" in told["error"]["message"] and "retry-after" not in headers


async def test_requests_at_once_hold_over_both(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    slow = body(stream=True, max_tokens=2_000, ignore_eos=True)
    running = [await http.post(url + CHAT, json=slow, headers=as_key("few")) for url in cluster.urls]
    assert [answer.status for answer in running] == [200, 200]
    for url in cluster.urls:
        status, told, headers = await ask(http, url, "few")
        assert (status, headers["retry-after"]) == (429, "1")
        assert "2 requests at once" in told["error"]["message"]
    running[0].close()  # the client leaves
    await until_ok(http, cluster.urls[1], "few")
    running[1].close()
    await until_ok(http, cluster.urls[0], "few")


async def until_ok(http: aiohttp.ClientSession, url: str, key: str) -> dict[str, str]:
    async with asyncio.timeout(5):
        while True:
            status, _, headers = await ask(http, url, key)
            if status == 200:
                return headers
            await asyncio.sleep(0.05)


async def test_who_leaves_pays_for_what_was_written(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    slow = body(stream=True, max_tokens=2_000, ignore_eos=True)
    answer = await http.post(cluster.urls[0] + CHAT, json=slow, headers=as_key("leaves"))
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 3_000
    await answer.content.readexactly(2_000)
    answer.close()
    headers = await until_ok(http, cluster.urls[1], "leaves")
    assert 4_000 < int(headers["x-ratelimit-remaining-tokens"]) < 4_990


async def test_a_key_asks_its_models_only(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    url = cluster.urls[0]
    status, told, _ = await ask(http, url, "other")
    assert (status, told["error"]["code"], told["error"]["param"]) == (403, "model_not_allowed", "model")
    for key, count in (("other", 0), ("ours", 1), ("free", 1)):
        async with http.get(url + "/v1/models", headers=as_key(key)) as answer:
            assert len((await answer.json())["data"]) == count
        async with http.get(url + "/v1/models/mock", headers=as_key(key)) as answer:
            assert answer.status == (200 if count else 403)
    asked = {"model": "mock", "prompt": "x", "tokens": [1], "messages": [{"role": "user", "content": "x"}]}
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"):
        sent = {key: value for key, value in asked.items() if key != "messages" or "messages" in path}
        async with http.post(url + path, json=sent, headers=as_key("other")) as answer:
            assert answer.status == 403, path
    status, _, headers = await ask(http, url, "ours")
    assert status == 200 and headers["x-ratelimit-limit-tokens"] == "90000"


async def test_streams_carry_the_same_headers(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    headers = {**as_key("ours"), "x-request-id": "mine-1", "Origin": "https://app.example"}
    async with http.post(cluster.urls[0] + CHAT, json=body(stream=True), headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-ratelimit-limit-requests"] == "100"
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        text = await answer.text()
    assert text.endswith("data: [DONE]\n\n")
    async with asyncio.timeout(5):
        while "mine-1" not in cluster.log:  # beside our own id
            await asyncio.sleep(0.05)


async def test_without_limits_there_are_no_such_headers(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, _, headers = await ask(http, cluster.urls[0], "free")
    assert status == 200 and not [name for name in headers if name.startswith("x-ratelimit")]


async def test_keys_come_and_go_while_it_runs(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    add(cluster.keys, "new", KeyEntry(sha256=digest("secret-new")))
    remove(cluster.keys, "revoked")
    async with asyncio.timeout(10):
        for url in cluster.urls:
            while (await ask(http, url, "new"))[0] != 200 or (await ask(http, url, "revoked"))[0] != 401:
                await asyncio.sleep(0.1)
    async with http.post(cluster.urls[0] + CHAT, json=body(), headers={"x-api-key": "secret-new"}) as answer:
        assert answer.status == 200


async def test_a_connection_with_half_a_request_is_closed(cluster: Cluster) -> None:
    host, port = cluster.urls[1].removeprefix("http://").split(":")
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        began = time.monotonic()
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        assert time.monotonic() - began > 1
        writer.close()
