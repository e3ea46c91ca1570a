"""`echo` with `logprobs`: what evaluation harnesses read, from a running Baton with the mock engine."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from running import Running
from sse import read_chunks

from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_scores, expected_tokens

TEXT = "Ça va? 😀 bien"
PROMPT = list(TEXT.encode())


@pytest.fixture
def baton(shared_baton: Running) -> Running:
    return shared_baton


def ask(baton: Running, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "mock", "prompt": prompt, "temperature": 0, "echo": True, **fields}
    status, answer = baton.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def name(token: int) -> str:
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def check_prompt(logprobs: dict[str, Any], prompt: list[int], count: int) -> None:
    """The entries of a prompt are what the mock must say of it."""
    wanted, length = expected_scores(prompt, count), len(prompt)
    assert logprobs["tokens"][:length] == [name(token) for token in prompt]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:length] == pytest.approx(wanted.chosen.tolist())
    if count:
        assert logprobs["top_logprobs"][0] is None
        for at, token in enumerate(prompt[1:]):
            likely = {
                name(other): value
                for other, value in zip(wanted.top_ids[at].tolist(), wanted.top[at].tolist(), strict=True)
            }
            told = logprobs["top_logprobs"][at + 1]
            assert told == pytest.approx({**likely, name(token): float(wanted.chosen[at])})
    else:
        assert logprobs["top_logprobs"] is None


@pytest.mark.parametrize("prompt", [TEXT, PROMPT], ids=["text", "tokens"])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("limit", [0, 1, 20])
def test_the_prompt_is_told_before_the_answer(baton: Running, prompt: Any, count: int, limit: int) -> None:
    answer = ask(baton, prompt, logprobs=count, max_tokens=limit)
    choice, output = answer["choices"][0], expected_tokens(PROMPT, SamplingParams(max_tokens=20))[:limit]
    assert choice["text"] == TEXT + bytes(output).decode() and choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == limit
    check_prompt(choice["logprobs"], PROMPT, count)
    assert choice["logprobs"]["tokens"][len(PROMPT) :] == [chr(token) for token in output]
    # A token's offset is where the first character that it has a part in begins.
    whole = PROMPT + output
    begun = [bytes(whole[:at]).decode(errors="ignore") for at in range(len(whole))]
    assert choice["logprobs"]["text_offset"] == [len(text) for text in begun]


def test_a_stream_says_the_same(baton: Running) -> None:
    body = {
        "model": "mock", "prompt": TEXT, "temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 6,
        "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        baton.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        chunks = read_chunks(response.read())
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    whole = ask(baton, TEXT, logprobs=2, max_tokens=6)["choices"][0]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [choice["logprobs"][field] for choice in choices if choice["logprobs"]]
        assert [entry for part in parts for entry in part] == whole["logprobs"][field], field


def test_several_prompts_and_choices(baton: Running) -> None:
    prompts = [list(range(97, 97 + length)) for length in (1, 2, 25)]
    answer = ask(baton, prompts, logprobs=1, max_tokens=2, n=2, temperature=1, seed=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for index, choice in enumerate(answer["choices"]):
        prompt = prompts[index // 2]
        check_prompt(choice["logprobs"], prompt, 1)
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=3)
        output = expected_tokens(prompt, params, choice=index % 2)
        assert choice["text"] == bytes(prompt + output).decode()


def test_the_best_is_judged_by_its_answer_alone(baton: Running) -> None:
    shared: dict[str, Any] = {"max_tokens": 3, "temperature": 1, "seed": 9, "logprobs": 0}
    drawn = ask(baton, TEXT, n=4, **shared)["choices"]
    best = ask(baton, TEXT, n=1, best_of=4, **shared)["choices"]
    likelihood = [sum(choice["logprobs"]["token_logprobs"][len(PROMPT) :]) for choice in drawn]
    assert [choice["text"] for choice in best] == [drawn[likelihood.index(max(likelihood))]["text"]]


def test_a_cached_prompt_is_scored_all_the_same(baton: Running) -> None:
    prompt = [97 + at * at % 26 for at in range(500)]
    for _ in range(2):
        answer = ask(baton, prompt, logprobs=1, max_tokens=1)
        check_prompt(answer["choices"][0]["logprobs"], prompt, 1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_no_answer_needs_an_echo(baton: Running) -> None:
    body = {"model": "mock", "prompt": TEXT, "max_tokens": 0}
    status, answer = baton.post("/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "max_tokens"
    assert ask(baton, TEXT, max_tokens=0)["choices"][0]["text"] == TEXT


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "maxLength": 6}}},
        },
    }
]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1, "seed": 5, "presence_penalty": 1.5, "logit_bias": {"120": 50}},
    "object": {"response_format": {"type": "json_object"}},
    "tool": {"tools": TOOLS, "tool_choice": "required"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_of_every_form_of_answer(baton: Running, form: str, count: int) -> None:
    body: dict[str, Any] = {
        "model": "mock", "messages": [{"role": "user", "content": "Hé"}], "max_tokens": 200, "temperature": 0,
        "logprobs": True, "top_logprobs": count, **FORMS[form],
    }  # fmt: skip
    status, answer = baton.post("/v1/chat/completions", body)
    assert status == 200, answer
    choice, entries = answer["choices"][0], answer["choices"][0]["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    if form == "tool":
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up" and call["function"]["arguments"] in raw
    else:
        assert choice["message"]["content"] == raw
    ended = choice["finish_reason"] != "length"
    assert len(entries) in (
        answer["usage"]["completion_tokens"],
        answer["usage"]["completion_tokens"] - ended,
    )
    for entry in entries:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == count and values == sorted(values, reverse=True)
        assert entry["logprob"] <= 0 and (form != "plain" or not count or entry["logprob"] == values[0])
    request = urllib.request.Request(
        baton.url + "/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        chunks = read_chunks(response.read())
    parts = [part["logprobs"]["content"] for chunk in chunks for part in chunk["choices"] if part["logprobs"]]
    assert [entry for part in parts for entry in part] == entries


def test_more_logprobs_than_there_may_be(baton: Running) -> None:
    messages = [{"role": "user", "content": "a"}]
    for fields, param in (
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ):
        status, answer = baton.post("/v1/chat/completions", {"model": "mock", "messages": messages, **fields})
        assert status == 400 and answer["error"]["param"] == param
    status, answer = baton.post("/v1/completions", {"model": "mock", "prompt": "a", "logprobs": 6})
    assert status == 400 and answer["error"]["param"] == "logprobs"


@pytest.mark.parametrize("name", ["functions", "function_call"])
def test_the_older_form_of_tools_is_refused_by_name(baton: Running, name: str) -> None:
    value: Any = [{"name": "f"}] if name == "functions" else {"name": "f"}
    body = {"model": "mock", "messages": [{"role": "user", "content": "a"}], name: value}
    status, answer = baton.post("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == name and "tool" in answer["error"]["message"]
