"""Requests of the Responses API as chats: turns, places that errors name, truncation."""

from __future__ import annotations

from typing import Any

import pytest

from baton.protocol.errors import Code, RequestError
from baton_services.gateway.naming import named
from baton_services.gateway.parse import parse
from baton_services.gateway.responses import items, translate, truncation
from baton_services.gateway.responses.handlers import page
from baton_services.gateway.responses.schema import ResponseRequest

CALL: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "1", "output": "x"}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_items_become_turns() -> None:
    given = [
        user("a"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        CALL,
        {**CALL, "call_id": "2"},
        RESULT,
        {**RESULT, "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "c"}, {"type": "text", "text": "d"}],
        },
    ]
    read = items.read(given, "r")
    assert [item["id"] for item in read][:2] == ["msg_r000", "rs_1"]
    messages, places = items.turns(read, [str(number) for number in range(len(given))])
    roles = ["user", "assistant", "tool", "tool", "developer"]
    assert [message.role for message in messages] == roles
    assert [len(message.tool_calls or []) for message in messages] == [0, 2, 0, 0, 0]
    assert [message.content for message in messages] == ["a", "b", "x", "y", "cd"]
    assert places == ["0", "2", "5", "6", "7"]


def test_what_is_kept_is_read_again_as_it_is() -> None:
    read = items.read([user("a"), CALL, RESULT], "r")
    assert items.read(read, "other") == read


@pytest.mark.parametrize(
    ("chats", "ours"),
    [
        ("messages", "input"),
        ("messages[0].content", "instructions"),
        ("messages[1].content", "input[0].content"),
        ("messages[2]", "input[4]"),
        ("tools[3].function.parameters", "tools[3].parameters"),
        ("tools[3].function", "tools[3]"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format", "text.format"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("max_tokens", "max_output_tokens"),
        ("temperature", "temperature"),
    ],
)
def test_errors_name_our_fields(chats: str, ours: str) -> None:
    rename = translate.renamed(["input[0]", "input[4]"], instructed=True)
    with pytest.raises(RequestError) as raised, named(rename):
        raise RequestError.of(Code.INVALID_REQUEST, f"{chats}: is wrong", param=chats)
    assert (raised.value.failure.param, raised.value.failure.message) == (ours, f"{ours}: is wrong")


@pytest.mark.parametrize("limit", range(7))
async def test_as_few_as_possible_are_dropped(limit: int) -> None:
    asked: list[int] = []

    async def fits(count: int) -> bool:
        asked.append(count)
        return count >= limit

    assert await truncation.fewest(6, fits) == min(limit, 5)
    assert len(asked) <= 4


def test_a_result_goes_with_its_call() -> None:
    read = items.read([user("a"), CALL, RESULT, user("b")], "r")
    kept, places = truncation.dropped(read, ["0", "1", "2", "3"], 2)
    assert ([item["type"] for item in kept], places) == (["message"], ["3"])
    kept, places = truncation.dropped(read, ["0", "1", "2", "3"], 1)
    assert places == ["1", "2", "3"]


def test_pages() -> None:
    known = items.read([user(str(number)) for number in range(30)], "r")
    first = page(known, {})
    assert (len(first["data"]), first["has_more"], first["first_id"]) == (20, True, known[-1]["id"])
    rest = page(known, {"after": first["last_id"]})
    assert (len(rest["data"]), rest["has_more"], rest["last_id"]) == (10, False, known[0]["id"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "m", "input": 5}', "input"),
        (b'{"model": "m", "input": "\\ud800"}', "input"),
        (b'{"model": "m", "metadata": {"k": 1}}', "metadata"),
        (b'{"model": "m", "metadata": {"' + b"k" * 65 + b'": "v"}}', "metadata"),
        (b'{"model": "m", "tools": [{"type": "function", "name": "a b"}]}', "tools[0].name"),
        (b'{"model": "m", "truncation": "middle"}', "truncation"),
        (b'{"input": "x"}', "model"),
    ],
)
def test_slips_are_named(body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse(body, ResponseRequest)
    assert raised.value.failure.param == param
