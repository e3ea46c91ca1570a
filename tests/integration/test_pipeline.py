"""The whole way of a request on the mock engine, whose text is wrong if any KV block was."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import psutil
import pytest
from running import Running

from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens

FLAGS = (
    "--engine", "mock", "--prefill", "2", "--decode", "2", "--kv-memory-mb", "16",
    "--router-local-prefill-tokens", "0", "--mock-step-us", "1000", "--mock-token-us", "10",
)  # fmt: skip


Json = dict[str, Any]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("pipeline"), *FLAGS) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(97, 123) for _ in range(length)]


def expected(tokens: list[int], count: int, **params: Any) -> str:
    made = SamplingParams(max_tokens=count, **params)
    return bytes(expected_tokens(tokens, made)).decode()


async def stream(session: aiohttp.ClientSession, url: str, body: Json) -> AsyncIterator[Json]:
    async with session.post(
        f"{url}/v1/completions", json={"model": "mock", "stream": True, **body}
    ) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                yield json.loads(line[6:])


async def text_of(session: aiohttp.ClientSession, url: str, body: Json) -> str:
    chunks = [chunk async for chunk in stream(session, url, body)]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 160, 1_000, 3_000])
def test_text_after_a_hand_off(baton: Running, length: int) -> None:
    """Shorter than a block, whole blocks exactly, many steps; again, with the blocks cached at both ends."""
    tokens = prompt(length, length)
    for _ in range(3):
        status, answer = baton.post(
            "/v1/completions", {"model": "mock", "prompt": tokens, "max_tokens": 40, "temperature": 0}
        )
        assert status == 200, answer
        assert answer["choices"][0]["text"] == expected(tokens, 40)
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1


def test_prefix_hits_are_used_and_change_nothing(baton: Running) -> None:
    shared = prompt(320, 7)
    for tail in range(6):
        tokens = shared + prompt(20 + tail, tail)
        _, answer = baton.post(
            "/v1/completions", {"model": "mock", "prompt": tokens, "max_tokens": 20, "temperature": 0}
        )
        assert answer["choices"][0]["text"] == expected(tokens, 20)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 320


def test_sampled_with_penalties_is_a_function_of_the_seed(baton: Running) -> None:
    tokens = prompt(50, 11)
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    body = {"model": "mock", "prompt": tokens, "max_tokens": 60, **params, "repetition_penalty": 1.1}
    _, answer = baton.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == expected(tokens, 60, **params, repetition_penalty=1.1)


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(baton: Running) -> None:
    tokens = prompt(64, 12)
    time.sleep(2.5)  # figures travel every 2 s
    before = baton.total("baton_handoffs_total")
    _, answer = baton.post(
        "/v1/completions", {"model": "mock", "prompt": tokens, "max_tokens": 1, "temperature": 0}
    )
    assert answer["choices"][0]["text"] == expected(tokens, 1)
    time.sleep(2.5)  # figures travel every 2 s
    assert baton.total("baton_handoffs_total", outcome="committed") <= before + 1e-9 or before == 0


async def test_64_streams_at_once(baton: Running) -> None:
    async with aiohttp.ClientSession() as session:
        prompts = [prompt(20 + 13 * index, 1_000 + index) for index in range(64)]
        texts = await asyncio.gather(
            *(
                text_of(session, baton.url, {"prompt": tokens, "max_tokens": 48, "temperature": 0})
                for tokens in prompts
            )
        )
    assert texts == [expected(tokens, 48) for tokens in prompts]


async def test_hand_offs_are_measured(baton: Running) -> None:
    async with aiohttp.ClientSession() as session:
        await text_of(session, baton.url, {"prompt": prompt(200, 77), "max_tokens": 4, "temperature": 0})
    await asyncio.sleep(2.5)  # figures travel every 2 s
    metrics = await asyncio.to_thread(baton.metrics)
    total = sum(value for name, value in metrics.items() if name.startswith("baton_handoff_bytes_total"))
    count = sum(value for name, value in metrics.items() if name.startswith("baton_handoff_seconds_count"))
    assert total >= 13 * 4096
    assert count >= 1
    assert any('transport="shm"' in name for name in metrics)


async def wait_idle(baton: Running, timeout_s: float = 6.0) -> None:
    """Until every worker reports no sequence and no block held."""
    deadline = time.monotonic() + timeout_s
    while True:
        metrics = await asyncio.to_thread(baton.metrics)
        busy = {
            name: value
            for name, value in metrics.items()
            if name.startswith(("baton_kv_blocks_used", "baton_requests_running", "baton_requests_waiting"))
            and value
        }
        if not busy:
            return
        assert time.monotonic() < deadline, busy
        await asyncio.sleep(0.3)


async def test_clients_that_leave_free_everything(baton: Running) -> None:
    rng = random.Random(3)

    async def leave(session: aiohttp.ClientSession, index: int) -> None:
        body = {
            "prompt": prompt(rng.randrange(10, 2_500), 5_000 + index),
            "max_tokens": 4_000,
            "temperature": 0,
        }
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.6)):
                async for _ in stream(session, baton.url, body):
                    pass
        except TimeoutError:
            return

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(leave(session, index) for index in range(60)))
    await wait_idle(baton)


def workers(baton: Running, role: str) -> list[psutil.Process]:
    children = psutil.Process(baton.process.pid).children(recursive=True)
    return [child for child in children if "serve" in child.cmdline() and role in child.cmdline()]


async def kill_one_of_each(baton: Running) -> None:
    for role in ("decode", "prefill"):
        await asyncio.sleep(0.3)
        workers(baton, role)[0].send_signal(signal.SIGKILL)


async def test_a_worker_killed_in_the_middle_changes_no_text(baton: Running) -> None:
    async with aiohttp.ClientSession() as session:
        prompts = [prompt(40 + 31 * index, 9_000 + index) for index in range(12)]
        running = [
            asyncio.create_task(
                text_of(session, baton.url, {"prompt": tokens, "max_tokens": 400, "temperature": 0})
            )
            for tokens in prompts
        ]
        await kill_one_of_each(baton)
        texts = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert texts == [expected(tokens, 400) for tokens in prompts]
    await wait_idle(baton, 10)


async def test_a_worker_killed_in_the_middle_changes_neither_choices_nor_logprobs_nor_usage(
    baton: Running,
) -> None:
    """Sampled, penalised, several choices of a prompt, some bound by a grammar: all as undisturbed."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}
    common: Json = {"model": "mock", "max_tokens": 300, "n": 2, "logprobs": 2, "temperature": 0.9}
    penalties: Json = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    bodies = [
        {**common, **penalties, "prompt": prompt(50 + 90 * index, 9_100 + index), "seed": index}
        | ({"guided_json": schema} if index % 2 else {})
        for index in range(6)
    ]

    async def whole(session: aiohttp.ClientSession, body: Json, salt: str) -> Json:
        async with session.post(f"{baton.url}/v1/completions", json={**body, "cache_salt": salt}) as answer:
            found: Json = await answer.json()
            assert answer.status == 200, found
            usage = {key: found["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
            return {"choices": found["choices"], "usage": usage}

    async with aiohttp.ClientSession() as session:
        undisturbed = await asyncio.gather(*(whole(session, body, "once") for body in bodies))
        running = [asyncio.create_task(whole(session, body, "again")) for body in bodies]
        await kill_one_of_each(baton)
        assert not all(task.done() for task in running), "the kills came too late"
        answers = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert answers == undisturbed
    assert all(choice["logprobs"]["tokens"] for answer in answers for choice in answer["choices"])
    await wait_idle(baton, 10)
