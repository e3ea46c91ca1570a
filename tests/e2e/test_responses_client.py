"""The Responses API through the official client: answers, streams, tools, forms, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_streams import check_responses, named_events
from openai import OpenAI
from openai.types.responses import Response
from openai_types import strict
from pydantic import BaseModel, Field
from rawhttp import dechunked, send
from running import Running

PATH = "/v1/responses"
GREEDY: Any = {"model": "mock", "temperature": 0, "max_output_tokens": 20}
WEATHER: Any = {
    "type": "function", "name": "weather", "description": "tells it", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    people: int = Field(ge=0, le=99)


@pytest.fixture
def client(shared_baton: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared_baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def body_of(baton: Running, **fields: Any) -> Any:
    status, body = baton.post(PATH, {**GREEDY, **fields})
    assert status == 200, body
    strict(Response, body)
    return body


def events_of(baton: Running, **fields: Any) -> list[Any]:
    answer = send(
        baton.url, "POST", PATH, json.dumps({**GREEDY, "stream": True, **fields}).encode(),
        {"Accept-Encoding": "identity"},
    )  # fmt: skip
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return named_events(dechunked(answer.body))


def test_a_text_is_answered_like_a_chat_of_one_turn(client: OpenAI) -> None:
    answer = client.responses.create(**GREEDY, instructions="Be brief.", input="Où est Paris ? 😀")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Où est Paris ? 😀"},
    ]
    chat = client.chat.completions.create(model="mock", messages=messages, max_tokens=20, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert chat.usage and answer.usage
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert (answer.status, answer.usage.output_tokens) == ("incomplete", 20)
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.id.startswith("resp_")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "hi", "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200},
        {"input": "hi", "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False},
        {"input": [{"role": "user", "content": "hi"}], "text": {"format": {"type": "json_object"}}},
        {"input": "hi", "store": False, "metadata": {"k": "v"}, "user": "u", "safety_identifier": "s"},
        {"input": "hi", "temperature": 1.0, "top_p": 0.9, "seed": 5, "top_k": 40},
    ],
    ids=str,
)
def test_streamed_it_is_the_same(shared_baton: Running, fields: Any) -> None:
    whole = body_of(shared_baton, **fields)
    last = check_responses(events_of(shared_baton, **fields))
    for name in ("output", "text", "tools", "tool_choice", "status", "metadata"):
        assert _nameless(last[name]) == _nameless(whole[name])
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def _nameless(value: Any) -> Any:
    """Without ids, which are each answer's own."""
    if isinstance(value, list):
        return [_nameless(item) for item in value]
    if isinstance(value, dict):
        return {key: _nameless(item) for key, item in value.items() if key not in ("id", "call_id")}
    return value


@pytest.mark.parametrize("seed", range(2))
def test_parsed(client: OpenAI, seed: int) -> None:
    fields: Any = {"model": "mock", "input": "Which?", "temperature": 1.0, "extra_body": {"seed": seed}}
    parsed = client.responses.parse(**fields, text_format=City).output_parsed
    assert isinstance(parsed, City)
    with client.responses.stream(**fields, text_format=City) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed and final.status == "completed"


def test_a_tool_is_called_and_its_result_read(client: OpenAI) -> None:
    fields: Any = {"model": "mock", "tools": [WEATHER], "max_output_tokens": 100, "temperature": 0}
    choice: Any = {"type": "function", "name": "weather"}
    first = client.responses.create(input="Weather?", tool_choice=choice, **fields)
    (call,) = first.output
    assert call.type == "function_call" and first.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain 😀"}
    linked = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **fields
    )
    told: Any = [{"role": "user", "content": "Weather?"}, call.to_dict(), result]
    spelled = client.responses.create(input=told, tool_choice="none", **fields)
    assert linked.output_text == spelled.output_text
    assert linked.usage and spelled.usage
    assert linked.usage.input_tokens == spelled.usage.input_tokens


def test_the_oldest_items_are_dropped_where_all_do_not_fit(client: OpenAI) -> None:
    turns: Any = [
        {"role": ("user", "assistant")[number % 2], "content": f"{number} " + "y" * 400}
        for number in range(21)
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**GREEDY, input=turns)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    fitted = client.responses.create(**GREEDY, input=turns, truncation="auto")
    assert fitted.usage and 3_500 < fitted.usage.input_tokens <= 4_076
    spelled = [client.responses.create(**GREEDY, input=turns[number:]) for number in range(12, 14)]
    assert fitted.output_text in [answer.output_text for answer in spelled]


USER: Any = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]},
         "input[1].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}},
         "tool_choice.name"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
            "text.format.schema",
        ),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "include": ["everything"]}, "include[0]"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "max_output_tokens": 5_000}, "input"),
        ({"input": "x" * 9_000}, "input"),
        ({"input": "x", "previous_response_id": "resp_x.>"}, "previous_response_id"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(shared_baton: Running, fields: Any, param: str) -> None:
    status, body = shared_baton.post(PATH, {"model": "mock", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert set(body["error"]) == {"message", "type", "param", "code"}
