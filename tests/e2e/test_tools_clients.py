"""Structured output and tool calls through the helpers of openai's own client.

On the mock engine, which knows nothing of JSON or tools: only the grammars make its answers fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ContentDoneEvent, FunctionToolCallArgumentsDeltaEvent
from pydantic import BaseModel, Field
from running import Running

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "16", "--router-local-prefill-tokens", "0",
    "--mock-step-us", "300", "--mock-token-us", "5",
)  # fmt: skip
MESSAGES: Any = [{"role": "user", "content": "hi"}]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Part(BaseModel):
    """A part of a thing."""

    colour: Colour
    count: int = Field(ge=1, le=9)


class Thing(BaseModel):
    """A thing with parts."""

    ready: bool
    main: Part = Field(description="a $ref with a sibling")
    others: list[Part] = Field(max_length=2)
    size: int | None


class Weather(BaseModel):
    """Weather of a city."""

    city: Colour
    days: int = Field(ge=1, le=5)


class Span(BaseModel):
    """From here to there."""

    start: int
    end: int


class Pong(BaseModel):
    """Answers a ping."""

    loud: bool


WEATHER: Any = {
    "type": "function",
    "function": {"name": "Weather", "description": "w\nw", "parameters": Weather.model_json_schema()},
}
PONG: Any = {"type": "function", "function": {"name": "Pong", "parameters": Pong.model_json_schema()}}


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("tools"), *FLAGS) as running:
        yield running


@pytest.fixture
def client(baton: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parse(client: OpenAI, temperature: float) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="mock", messages=MESSAGES, response_format=Thing, temperature=temperature, seed=seed
        )
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Thing)
        assert answer.choices[0].finish_reason == "stop"


def test_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="mock", messages=MESSAGES, response_format=Thing, temperature=0, seed=1
    ) as stream:
        events = list(stream)
    done = [event for event in events if isinstance(event, ContentDoneEvent)]
    assert isinstance(done[0].parsed, Thing)
    whole = client.chat.completions.parse(
        model="mock", messages=MESSAGES, response_format=Thing, temperature=0, seed=1
    )
    assert whole.choices[0].message.parsed == done[0].parsed


def test_an_answer_cut_short_is_said_to_be(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="mock", messages=MESSAGES, response_format=Thing, max_tokens=3)


def test_parsed_tools(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="mock",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Pong)],
        tool_choice="required",
        temperature=1.0,
        seed=4,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Weather | Pong) for call in calls)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_streamed_calls_are_the_same_as_whole_ones(client: OpenAI, choice: Any) -> None:
    fields: Any = {
        "model": "mock", "messages": MESSAGES, "tools": [WEATHER, PONG], "tool_choice": choice,
        "temperature": 0.9, "seed": 11,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0]
    calls: list[dict[str, str]] = []
    finish: list[str] = []
    for chunk in client.chat.completions.create(**fields, stream=True):
        part = chunk.choices[0]
        finish += [part.finish_reason] if part.finish_reason else []
        for delta in part.delta.tool_calls or []:
            assert delta.function
            if delta.index == len(calls):
                assert delta.id and delta.type == "function"
                assert (delta.function.arguments, delta.function.name in ("Weather", "Pong")) == ("", True)
                calls.append({"id": delta.id, "name": delta.function.name or "", "arguments": ""})
            else:
                assert delta.id is None
                assert delta.function.name is None
                assert delta.function.arguments
                calls[delta.index]["arguments"] += delta.function.arguments
    assert finish == ["tool_calls"]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    named = [
        (call.function.name, call.function.arguments)
        for call in whole.message.tool_calls
        if call.type == "function"
    ]
    assert [(call["name"], call["arguments"]) for call in calls] == named
    for name, arguments in named:
        (Weather if name == "Weather" else Pong).model_validate_json(arguments)


def test_arguments_come_in_pieces(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="mock", messages=MESSAGES, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [event for event in stream if isinstance(event, FunctionToolCallArgumentsDeltaEvent)]
        final = stream.get_final_completion().choices[0]
    assert len(pieces) > 1
    assert final.message.tool_calls
    assert len(final.message.tool_calls) == 1
    assert final.message.tool_calls[0].function.arguments == "".join(
        piece.arguments_delta for piece in pieces
    )


def test_a_call_cut_short_ends_with_length(client: OpenAI) -> None:
    fields: Any = {"model": "mock", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    answer = client.chat.completions.create(**fields, max_tokens=60, temperature=0).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls
    call = answer.message.tool_calls[0]
    assert call.type == "function"
    with pytest.raises(ValueError):
        json.loads(call.function.arguments)


def test_tools_that_are_not_called_and_turns_with_calls(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "Pong", "arguments": '{"loud": true}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "PONG"},
        {"role": "user", "content": "again"},
    ]
    for choice in ("auto", "none"):
        answer: Any = client.chat.completions.create(
            model="mock", messages=messages, tools=[WEATHER, PONG], tool_choice=choice, max_tokens=8
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None


def test_tools_and_a_form_together(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="mock", messages=MESSAGES, tools=[openai.pydantic_function_tool(Weather)], response_format=Pong,
        temperature=1.0, seed=2,
    )  # fmt: skip
    message = answer.choices[0].message
    assert isinstance(message.parsed, Pong) or message.tool_calls


def test_a_choice_among_some_of_the_tools(client: OpenAI) -> None:
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "Pong"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    for seed in range(3):
        answer: Any = client.chat.completions.create(
            model="mock", messages=MESSAGES, tools=[WEATHER, PONG], tool_choice=choice, seed=seed
        )
        assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"Pong"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [PONG], "tool_choice": "any"}, "tool_choice", "required"),
        (
            {"tools": [PONG], "tool_choice": {"type": "function", "function": {"name": "Ping"}}},
            "tool_choice.function.name",
            "Ping",
        ),
        (
            {"tools": [PONG], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}},
            "tool_choice.allowed_tools.mode",
            "auto",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [PONG, PONG]}, "tools[1].function.name", "twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "match"),
    ],
)
def test_tools_that_cannot_be(client: OpenAI, fields: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="mock", messages=MESSAGES, max_tokens=4, **fields)
    assert refused.value.param == param
    assert words in refused.value.message
