"""Mutated bodies: whatever comes, an answer comes; never a 5xx or a hang, always its API's error shape."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from running import Running

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "8", "--mock-step-us", "200", "--mock-token-us", "1",
    "--mock-max-context", "512",
)  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 2, "temperature": 0.5, "top_p": 1, "n": 1, "stop": ["x"], "seed": 1,
            "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2, "min_tokens": 0,
            "stop_token_ids": [3], "priority": 1, "cache_salt": "s", "tools": [TOOL],
            "chat_template_kwargs": {"x": 1},
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
        },
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "1"},
            ],
            "max_tokens": 2,
        },
    ),
    (COMPLETIONS, {"prompt": ["a", [1, 2]], "max_tokens": 2, "echo": False, "logprobs": 1, "best_of": 1}),
    (COMPLETIONS, {"prompt": "hey", "max_tokens": 2, "stream": True, "guided_regex": "[ab]+", "n": 2}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
            ],
            "instructions": "i", "max_output_tokens": 2, "temperature": 0.5, "top_p": 1, "top_logprobs": 1,
            "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "truncation": "auto",
            "tools": [{"type": "function", "name": "f", "parameters": TOOL["function"]["parameters"]}],
            "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False,
            "reasoning": {"effort": "low"}, "store": True, "seed": 1,
        },
    ),
    (
        RESPONSES,
        {
            "input": "hi", "max_output_tokens": 2, "stream": True, "previous_response_id": None,
            "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}, "verbosity": "low"},
        },
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
            ],
            "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "temperature": 0.5, "top_k": 5,
            "tools": [{"name": "f", "input_schema": SCHEMA}], "metadata": {"user_id": "u"},
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["x"],
        },
    ),
    (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
            "max_tokens": 2, "stream": True, "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": "hi"}], "system": "s"}),
]  # fmt: skip
NAMES = ["unknown", "type", "content", "max_tokens", "guided_json", "tool_choice", "continue_final_message"]
NAMES += ["input", "role", "id", "call_id", "arguments", "thinking", "text"]
OPENAIS = {"message", "type", "param", "code"}
BYTES = [b"{", b'"', b"[", b"\\", b",", b"null", b"\xff", b"NaN", b"1e9", b"\\ud800"]


def values() -> list[Any]:
    return [
        None, True, False, 0, -1, 1, 2, 1.5, 1e308, 2**63, 2**64, 10**30, float("nan"), float("inf"), "", "x",
        "\0", "\ud800", "😀" * 50, "a" * 3_000, "[", [], {}, [[]], [None], ["a"] * 5, [0, 1], {"a": None},
        {"": ""}, {"type": "object"}, {"$ref": "#"}, {"type": ["string", "null"]},
    ]  # fmt: skip


def places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*place, key))


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    tree = json.loads(json.dumps({"model": "mock", **body}))
    for _ in range(rng.choice([0, 1, 1, 2])):
        *way, last = rng.choice(list(places(tree)) or [("x",)])
        node = tree
        for key in way:
            node = node[key]
        match rng.randrange(5):
            case 0 if isinstance(node, dict):
                node.pop(last, None)
            case 1 if isinstance(node, dict):
                node[rng.choice(NAMES)] = rng.choice(values())
            case 2:
                node[last] = [node.get(last) if isinstance(node, dict) else node[last]]
            case _:
                node[last] = rng.choice(values())
    raw = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return damaged(raw, rng) if rng.random() < 0.2 else raw


def damaged(raw: bytes, rng: random.Random) -> bytes:
    out = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(3):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                del out[at : at + rng.randrange(1, 6)]
            case 2:
                out[at:at] = rng.choice(BYTES)
    return bytes(out)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 600), pytest.param(2, 20_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_mutated_bodies(seed: int, count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng, seen = random.Random(seed), Counter[int]()
    with Running(tmp_path_factory.mktemp("fuzz"), *FLAGS) as baton:
        timeout = aiohttp.ClientTimeout(total=20)
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(baton.url, timeout=timeout, headers=headers) as session:
            for _ in range(count):
                path, body = rng.choice(BODIES)
                raw = mutated(body, rng)
                async with session.post(path, data=raw) as answer:
                    text = await answer.read()
                seen[answer.status] += 1
                assert answer.status in (200, 400, 404), f"{raw!r} was answered {text!r}"
                if answer.status != 200:
                    members = {"type", "message"} if path.startswith(MESSAGES) else OPENAIS
                    assert set(json.loads(text)["error"]) == members, raw
        assert "Traceback" not in baton.log
    assert seen[200] > count / 20 and seen[400] > count / 5, seen
