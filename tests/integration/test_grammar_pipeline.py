"""Grammars over the whole way of a request on the mock engine: the same text whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import jsonschema
import psutil
import pytest
from running import Running
from schemas import random_schema

from baton.protocol.request import Structure
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton.text.grammar.compose import compose
from baton.text.grammar.open import open_states
from baton.text.mock import EOS, IM_END

FLAGS = (
    "--engine", "mock", "--prefill", "2", "--decode", "2", "--kv-memory-mb", "16",
    "--router-local-prefill-tokens", "0", "--mock-step-us", "3000", "--mock-token-us", "10",
)  # fmt: skip
STATES = open_states("mock", "")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 40},
    },
    "required": ["list", "name"],
}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("grammar"), *FLAGS) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(97, 123) for _ in range(length)]


def expected(tokens: list[int], schema: Any, count: int, *, choice: int = 0, **params: Any) -> str:
    constraint = compose(Structure(kind="json_schema", text=json.dumps(schema)), None, None)
    made = SamplingParams(max_tokens=count, constraint=constraint, stop_token_ids=[EOS, IM_END], **params)
    out = expected_tokens(tokens, made, choice=choice, states=STATES)
    return bytes(token for token in out if token < 256).decode(errors="replace")


def body(tokens: list[int], schema: Any, count: int, **more: Any) -> Json:
    return {"model": "mock", "prompt": tokens, "max_tokens": count, "guided_json": schema, **more}


@pytest.mark.parametrize("seed", range(4))
def test_text_after_a_hand_off(baton: Running, seed: int) -> None:
    """Several lengths of prompt, twice: the second time with the prompt's blocks cached."""
    schema = random_schema(seed)
    tokens = prompt(40 * seed + 15, seed)
    for temperature in (0, 1, 0):
        params = {"temperature": temperature, "seed": seed}
        status, answer = baton.post("/v1/completions", body(tokens, schema, 600, **params))
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["text"] == expected(tokens, schema, 600, **params)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)


def test_each_choice_has_its_own_state(baton: Running) -> None:
    tokens = prompt(100, 9)
    params: Json = {"temperature": 1.0, "seed": 5, "presence_penalty": 0.4, "logit_bias": {"34": 2.0}}
    _, answer = baton.post("/v1/completions", body(tokens, SCHEMA, 400, n=3, **params))
    made = {**params, "logit_bias": {34: 2.0}}
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [expected(tokens, SCHEMA, 400, choice=choice, **made) for choice in range(3)]
    assert len(set(texts)) == 3


def test_logprobs_and_stop_strings_go_together_with_a_grammar(baton: Running) -> None:
    tokens = prompt(20, 3)
    whole = expected(tokens, SCHEMA, 400)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    params = {"temperature": 0, "logprobs": 2, "stop": stop}
    _, answer = baton.post("/v1/completions", body(tokens, SCHEMA, 400, **params))
    choice = answer["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_a_worker_killed_in_the_middle_changes_no_text(baton: Running) -> None:
    """Replays read the grammar again from the output so far."""

    async def text_of(session: aiohttp.ClientSession, tokens: list[int]) -> str:
        sent = body(tokens, SCHEMA, 500, temperature=0.8, seed=tokens[0])
        async with session.post(f"{baton.url}/v1/completions", json=sent) as answer:
            assert answer.status == 200, await answer.text()
            found: Json = await answer.json()
            return str(found["choices"][0]["text"])

    workers = [
        process
        for process in psutil.Process(baton.process.pid).children(recursive=True)
        if "serve" in process.cmdline() and {"prefill", "decode"} & set(process.cmdline())
    ]
    prompts = [prompt(30 + 17 * index, 400 + index) for index in range(8)]
    async with aiohttp.ClientSession() as session:
        running = [asyncio.create_task(text_of(session, tokens)) for tokens in prompts]
        for role in ("decode", "prefill"):
            await asyncio.sleep(0.4)
            next(worker for worker in workers if role in worker.cmdline()).send_signal(signal.SIGKILL)
        texts = await asyncio.wait_for(asyncio.gather(*running), 90)
    assert texts == [expected(tokens, SCHEMA, 500, temperature=0.8, seed=tokens[0]) for tokens in prompts]


def test_completions_take_a_response_format_as_well(baton: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["one", "two"]}}}
    sent = {"model": "mock", "prompt": "p", "max_tokens": 30, "response_format": form}
    _, answer = baton.post("/v1/completions", sent)
    assert answer["choices"][0]["text"] in ('"one"', '"two"')


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json", "properties.a: 'not'"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": 3}, "guided_json", "must be a JSON schema"),
        ({"guided_regex": "(a"}, "guided_regex", "regex"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "list of strings"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "neither Lark nor GBNF"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one form"),
        ({"structured_outputs": {"regex": "(a)\\1"}}, "structured_outputs.regex", "backreferences"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        ({"structured_outputs": []}, "structured_outputs", "object"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "match",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "#/a"}},
                }
            },
            "response_format.json_schema.schema",
            "/a",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(baton: Running, fields: Json, param: str, words: str) -> None:
    chat = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    status, answer = baton.post("/v1/chat/completions", chat)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"json_object": True}}, r"\{[^$]*\}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "1"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, r"\{[^$]*\}"),
    ],
)
def test_forms_of_chat(baton: Running, fields: Json, pattern: str) -> None:
    chat = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}
    status, answer = baton.post("/v1/chat/completions", {**chat, "max_tokens": 600})
    assert status == 200, answer
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])
    assert answer["choices"][0]["finish_reason"] == "stop"
