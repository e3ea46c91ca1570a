"""The Responses API's answers from deltas: typed events in their order, the same whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from api_streams import check_responses, named_events
from openai.types.responses import Response
from openai_types import strict

from baton.protocol.request import CallDelta, TextDelta, TokenText, Usage
from baton_services.gateway.errors import HttpError, internal
from baton_services.gateway.responses import translate
from baton_services.gateway.responses.schema import ResponseRequest, ResponseTool
from baton_services.gateway.responses.shape import ResponseShape
from baton_services.gateway.shapes import Whole

USAGE = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2, reasoning_tokens=1)
EURO = [TokenText(b"a\xe2\x82", -0.5, [(b"b", -1.5)]), TokenText(b"\xac", float("-inf"))]
Json = dict[str, Any]


async def nobody(_: Json) -> None:
    """Keeps nothing."""


def shape(*, logprobs: bool = False, **fields: Any) -> ResponseShape:
    request = ResponseRequest(model="m", input="hi", **fields)
    head = translate.head(request, "resp_1")
    return ResponseShape(head, request="1", logprobs=logprobs, keep=nobody)


def streamed(made: ResponseShape, deltas: list[TextDelta], finish: str = "stop") -> list[Json]:
    events = made.first(0, deltas[0])
    for delta in deltas:
        events += made.text(0, delta)
    events += made.last(0, finish)
    events += made.end(USAGE)
    return named_events(b"".join(map(made.frame, events)))


def delta(text: str = "", **fields: Any) -> TextDelta:
    return TextDelta("r", 0, text, **fields)


@pytest.mark.parametrize("logprobs", [True, False])
def test_text(logprobs: bool) -> None:
    deltas = [delta(tokens=EURO[:1]), delta("a€", tokens=EURO[1:]), delta(" \u2028x\n")]
    last = check_responses(streamed(shape(logprobs=logprobs), deltas))
    (item,) = last["output"]
    (part,) = item["content"]
    assert (last["status"], item["role"], part["text"]) == ("completed", "assistant", "a€ \u2028x\n")
    assert [entry["bytes"] for entry in part["logprobs"]] == (
        [list(b"a\xe2\x82"), [0xAC]] if logprobs else []
    )
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    whole = shape(logprobs=logprobs)
    body = whole.whole([Whole("a€ \u2028x\n", EURO, "stop")], USAGE)
    strict(Response, body)
    assert body["output"] == last["output"]


def test_reasoning_text_and_calls_each_have_their_item() -> None:
    calls = [CallDelta(0, "call_a", "f", "", 0), CallDelta(0, "", "", '{"x"', 0)]
    more = [CallDelta(0, "", "", ":1}", 4), CallDelta(1, "call_b", "g", "", 0)]
    deltas = [
        delta(reasoning="I th"), delta(reasoning="ink", text="So"), delta(":", calls=calls), delta(calls=more)
    ]  # fmt: skip
    last = check_responses(streamed(shape(), deltas, "tool_calls"))
    reasoning, message, first, second = last["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert message["content"][0]["text"] == "So:"
    assert [(call["call_id"], call["name"], call["arguments"]) for call in (first, second)] == [
        ("call_a", "f", '{"x":1}'),
        ("call_b", "g", ""),
    ]
    assert len({item["id"] for item in last["output"]}) == 4
    whole = [CallDelta(0, "call_a", "f", '{"x":1}', 0), CallDelta(1, "call_b", "g", "", 0)]
    body = shape().whole([Whole("So:", [], "tool_calls", "I think", whole)], USAGE)
    assert body["output"] == last["output"] and body["status"] == "completed"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    last = check_responses(streamed(shape(), [delta()]))
    assert last["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("part", [{"text": "a"}, {"calls": [CallDelta(0, "c", "f", '{"', 0)]}])
def test_an_answer_cut_short_says_so(part: Json) -> None:
    last = check_responses(streamed(shape(), [delta(**part)], "length"))
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (last["status"], last["output"][0]["status"]) == ("incomplete", "incomplete")
    assert "completed_at" not in last


def test_what_is_cancelled_ends_so() -> None:
    last = check_responses(streamed(shape(), [delta("a")], "cancelled"))
    assert (last["status"], last["output"][0]["status"]) == ("cancelled", "incomplete")
    assert last["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("error", [internal(), HttpError(429, "full")])
def test_a_failure_amid_the_stream_is_its_last_event(error: HttpError) -> None:
    made = shape()
    events = made.first(0) + made.text(0, delta("half"))
    events.append(made.failed(error))
    last = check_responses(named_events(b"".join(map(made.frame, events))))
    assert last["error"]["code"] == ("rate_limit_exceeded" if error.status == 429 else "server_error")
    assert last["output"][0]["content"][0]["text"] == "half"


def test_what_was_asked_is_repeated() -> None:
    tool = ResponseTool("function", "f", "does f", {"type": "object"}, True)
    fields: Json = {
        "tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "temperature": 0.5, "top_p": 0.9,
        "max_output_tokens": 7, "metadata": {"a": "b"}, "instructions": "Be.", "user": "u",
        "previous_response_id": "resp_0", "truncation": "auto", "parallel_tool_calls": False,
    }  # fmt: skip
    body = shape(**fields).whole([Whole("a", [], "stop")], USAGE)
    strict(Response, body)
    shown = {"type": "function", "name": "f", "description": "does f", "strict": True}
    assert body["tools"] == [shown | {"parameters": {"type": "object"}}]
    assert {key: body[key] for key in fields if key != "tools"} == {
        key: value for key, value in fields.items() if key != "tools"
    }


async def test_it_is_kept_before_the_end_is_sent() -> None:
    kept: list[Json] = []

    async def keep(response: Json) -> None:
        kept.append(response)

    made = ResponseShape(
        translate.head(ResponseRequest(model="m"), "resp_1"), request="1", logprobs=False, keep=keep
    )
    events = made.first(0) + made.text(0, delta("a")) + made.last(0, "stop") + made.end(USAGE)
    await made.settle()
    assert kept == [events[-1]["response"]]
