"""Requests of the Messages API as chats: turns, tools, thinking, places that errors name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.protocol.errors import RequestError
from baton_services.gateway import build
from baton_services.gateway.messages import translate
from baton_services.gateway.messages.schema import MessagesRequest
from baton_services.gateway.schema import ChatRequest

USE: Any = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1"}


def text(words: str) -> Any:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def chat(*messages: Any, reasons: bool = False, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 2_000, "messages": messages, **fields}
    made, _ = translate.chat(msgspec.convert(body, MessagesRequest), reasons=reasons)
    build.chat(made, build.Envelope("r", "s", 1_000))
    return made


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Any:
    return {"role": "assistant", "content": content}


def test_blocks_become_turns() -> None:
    made = chat(
        user([text("a"), text("b")]),
        user("c"),
        assistant([{"type": "thinking", "thinking": "hm", "signature": ""}, text("d"), USE]),
        user([text("e"), {**RESULT, "content": [text("x")], "is_error": True}]),
        {"role": "system", "content": "f"},
        system=[text("s")],
    )
    turns = [(turn.role, turn.content) for turn in made.messages]
    assert turns == [
        ("system", "s"), ("user", "ab\n\nc"), ("assistant", "d"), ("tool", "Error: x"), ("user", "e"),
        ("system", "f"),
    ]  # fmt: skip
    calls = made.messages[2].tool_calls
    assert calls and (calls[0].id, calls[0].function.arguments) == ("t1", '{"a":"é"}')
    assert made.add_generation_prompt


def test_an_assistants_last_words_are_gone_on_with() -> None:
    made = chat(user("a"), assistant("b"))
    assert made.continue_final_message and not made.add_generation_prompt
    assert not chat(user("a"), assistant("")).continue_final_message
    assert not chat(user("a"), assistant([USE])).continue_final_message


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        (None, None), ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)  # fmt: skip
def test_tool_choices(choice: Any, chats: Any) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    made = chat(user("a"), tools=tools, tool_choice=choice)
    assert made.tool_choice == chats and made.parallel_tool_calls
    if choice:
        choice = {**choice, "disable_parallel_tool_use": True}
        assert not chat(user("a"), tools=tools, tool_choice=choice).parallel_tool_calls


@pytest.mark.parametrize(
    ("thinking", "reasons", "arguments"),
    [
        (None, True, {"x": 1}),
        ({"type": "enabled", "budget_tokens": 1_500}, True, {"enable_thinking": True, "x": 1}),
        ({"type": "adaptive"}, True, {"enable_thinking": True, "x": 1}),
        ({"type": "disabled"}, True, {"enable_thinking": False, "x": 1}),
        ({"type": "adaptive"}, False, {"x": 1}),
    ],
)
def test_thinking_is_the_templates_business(thinking: Any, reasons: bool, arguments: Any) -> None:
    made = chat(user("a"), thinking=thinking, reasons=reasons, chat_template_kwargs={"x": 1})
    assert made.chat_template_kwargs == arguments


@pytest.mark.parametrize(
    ("thinking", "reasons", "param"),
    [
        ({"type": "enabled", "budget_tokens": 1_500}, False, "thinking"),
        ({"type": "enabled"}, True, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 1_000}, True, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 2_000}, True, "thinking.budget_tokens"),
    ],
)
def test_thinking_that_cannot_be(thinking: Any, reasons: bool, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat(user("a"), thinking=thinking, reasons=reasons)
    assert raised.value.failure.param == param


@pytest.mark.parametrize(
    ("chats", "ours"),
    [
        ("messages[0].content", "system.content"),
        ("messages[1].content", "messages[0].content"),
        ("messages", "messages"),
        ("tools[2].function.parameters", "tools[2].input_schema"),
        ("tools[2].function", "tools[2]"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("stop", "stop_sequences"),
        ("max_completion_tokens", "max_tokens"),
    ],
)
def test_errors_name_our_fields(chats: str, ours: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [user("a")], "system": "s"}
    _, rename = translate.chat(msgspec.convert(body, MessagesRequest), reasons=False)
    assert rename(chats) == ours
