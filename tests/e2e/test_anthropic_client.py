"""The Messages API through Anthropic's own client: answers, streams, tools, counts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import ErrorResponse, Message
from api_streams import check_messages, named_events
from openai_types import strict
from pydantic import BaseModel
from rawhttp import dechunked, send
from running import Running

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
FIELDS: Any = {"model": "mock", "max_tokens": 20, "temperature": 0, "messages": HI}
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER: Any = {"name": "weather", "description": "tells it", "input_schema": CITY}


class City(BaseModel):
    """A city."""

    big: bool


@pytest.fixture
def client(shared_baton: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=shared_baton.url, api_key="none", max_retries=0) as client:
        yield client


def body_of(baton: Running, **fields: Any) -> Any:
    status, body = baton.post(PATH, {**FIELDS, **fields})
    assert status == 200, body
    strict(Message, body)
    return body


def events_of(baton: Running, **fields: Any) -> list[Any]:
    body = json.dumps({**FIELDS, "stream": True, **fields}).encode()
    answer = send(baton.url, "POST", PATH, body)
    assert answer.status == 200 and answer.headers["request-id"]
    return named_events(dechunked(answer.body))


def test_it_answers_like_the_chat_of_the_same_turns(shared_baton: Running, client: Anthropic) -> None:
    blocks: Any = [{"type": "text", "text": "Où est "}, {"type": "text", "text": "Paris ? 😀"}]
    message = client.messages.create(
        model="mock", max_tokens=20, system="Be brief.", messages=[{"role": "user", "content": blocks}],
        extra_body={"temperature": 0},
    )  # fmt: skip
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où est Paris ? 😀"}]
    _, chat = shared_baton.post(
        "/v1/chat/completions", {"model": "mock", "messages": turns, "max_tokens": 20, "temperature": 0}
    )
    assert message.content[0].text == chat["choices"][0]["message"]["content"]  # type: ignore[union-attr]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)
    counted = client.messages.count_tokens(
        model="mock", system="Be brief.", messages=[{"role": "user", "content": blocks}]
    )
    read = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + read == chat["usage"]["prompt_tokens"]
    assert message._request_id


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 3, "metadata": {"user_id": "u"}},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200},
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 100},
        {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}, "stop_sequences": ["e", " ", "a", "o"]},
        {"output_config": {"format": {"type": "json_schema", "schema": CITY}}, "max_tokens": 100},
        {"messages": [*HI, {"role": "assistant", "content": "Once"}], "stop_sequences": []},
        {"system": [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}]},
    ],
    ids=str,
)
def test_streamed_it_is_the_same(shared_baton: Running, fields: Any) -> None:
    whole = body_of(shared_baton, **fields)
    made = check_messages(events_of(shared_baton, **fields))
    for block in whole["content"] + made["content"]:
        block.pop("id", None)
    for name in ("content", "stop_reason", "stop_sequence"):
        assert made[name] == whole[name]
    assert made["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_clients_accumulator_takes_our_stream(client: Anthropic) -> None:
    with client.messages.stream(
        model="mock", max_tokens=200, messages=HI, tools=[WEATHER], tool_choice={"type": "any"}
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    uses = [block for block in final.content if block.type == "tool_use"]
    assert uses and all(use.input["city"] in ("Oslo", "Rome") for use in uses)


def test_a_tools_result_is_read(shared_baton: Running, client: Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    first = client.messages.create(
        model="mock", max_tokens=100, messages=HI, tools=[WEATHER], tool_choice=choice
    )
    (use,) = first.content
    assert use.type == "tool_use" and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    turns: Any = [
        *HI,
        {"role": "assistant", "content": [use.to_dict()]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    answer = client.messages.create(model="mock", max_tokens=9, messages=turns, extra_body={"temperature": 0})
    call = {"id": use.id, "type": "function", "function": {"name": "weather"}}
    call["function"]["arguments"] = json.dumps(use.input, separators=(",", ":"))  # type: ignore[index]
    told = [
        *HI, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": use.id, "content": "rain"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    _, chat = shared_baton.post(
        "/v1/chat/completions", {"model": "mock", "messages": told, "max_tokens": 9, "temperature": 0}
    )
    assert answer.content[0].text == chat["choices"][0]["message"]["content"]  # type: ignore[union-attr]


def test_an_answer_begun_is_continued_and_stops_where_it_should(client: Anthropic) -> None:
    turns: Any = [*HI, {"role": "assistant", "content": "Once"}]
    answer = client.messages.create(
        model="mock", max_tokens=200, messages=turns, stop_sequences=["e", "a"],
        extra_body={"temperature": 0},
    )  # fmt: skip
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence in ("e", "a")
    text = answer.content[0].text if answer.content else ""  # type: ignore[union-attr]
    assert "e" not in text and "a" not in text


def test_parsed(client: Anthropic) -> None:
    answer = client.messages.parse(model="mock", max_tokens=100, messages=HI, output_format=City)
    assert isinstance(answer.parsed_output, City)


USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 9_000}, 400, "invalid_request_error", "context"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error",
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [USE]}]}, 400, "invalid_request_error", "tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]}, 400,
         "invalid_request_error", "messages[0].content[0].tool_use_id"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2_000}, "max_tokens": 3_000}, 400,
         "invalid_request_error", "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error",
         "tools[0].type"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}}, 400,
         "invalid_request_error", "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [WEATHER]}, 400, "invalid_request_error",
         "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"output_config": {"format": {"type": "regex"}}}, 400, "invalid_request_error", "output_config"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_are_anthropics(
    shared_baton: Running, fields: Any, status: int, kind: str, words: str
) -> None:
    asked = {name: value for name, value in {**FIELDS, **fields}.items() if value is not None}
    answered, body = shared_baton.post(PATH, asked)
    assert answered == status, body
    error = strict(ErrorResponse, body).error
    assert error.type == kind and words in error.message


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", PATH, b"", 405), ("POST", f"{PATH}/nope", b"{}", 404), ("POST", PATH, b"{", 400),
        ("POST", f"{PATH}/count_tokens", b"", 400), ("POST", "/messages", b"[]", 400),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_below_it(
    shared_baton: Running, method: str, path: str, body: bytes, status: int
) -> None:
    answer = send(shared_baton.url, method, path, body, {"x-request-id": "mine"})
    told = strict(ErrorResponse, json.loads(answer.body))
    assert (answer.status, told.request_id, answer.headers["request-id"]) == (status, "mine", "mine")


def test_the_clients_errors(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=1, messages=HI)
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="mock", max_tokens=9_000, messages=HI)
