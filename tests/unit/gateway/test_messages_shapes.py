"""The Messages API's answers from deltas: events by block, the same whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message
from api_streams import check_messages, named_events
from openai_types import strict

from baton.protocol.request import CallDelta, TextDelta, Usage
from baton_services.gateway.errors import HttpError, internal
from baton_services.gateway.messages import errors
from baton_services.gateway.messages.shape import UNPARSED, MessageShape
from baton_services.gateway.shapes import Whole

USAGE = Usage(prompt_tokens=30, completion_tokens=4, cached_tokens=16)
Json = dict[str, Any]


def shape() -> MessageShape:
    return MessageShape("1", "m", "req")


def streamed(deltas: list[TextDelta], finish: str) -> Json:
    made = shape()
    events = made.first(0, deltas[0])
    for delta in deltas:
        events += made.text(0, delta)
    events += made.last(0, finish) + made.end(USAGE)
    return check_messages(named_events(b"".join(map(made.frame, events))))


def delta(text: str = "", **fields: Any) -> TextDelta:
    return TextDelta("r", 0, text, **fields)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [("stop", "", "end_turn"), ("stop", "\n", "stop_sequence"), ("length", "", "max_tokens")],
)
def test_text_and_why_it_ends(finish: str, stop: str, reason: str) -> None:
    message = streamed([delta("a€"), delta(" \u2028x", stop=stop)], finish)
    assert message["content"] == [{"type": "text", "text": "a€ \u2028x"}]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop or None)
    whole = shape().whole([Whole("a€ \u2028x", [], finish, stop=stop)], USAGE)
    strict(Message, whole)
    assert whole == message


def test_tokens_from_a_cache_are_counted_apart() -> None:
    message = streamed([delta("a", usage=USAGE)], "stop")
    counted = {"input_tokens": 14, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0}
    assert message["usage"] == counted | {"output_tokens": 4}


def test_the_start_knows_the_prompt() -> None:
    start, ping = shape().first(0, delta("a", usage=Usage(prompt_tokens=30, completion_tokens=1)))
    assert (start["message"]["usage"]["input_tokens"], ping) == (30, {"type": "ping"})


def test_thinking_text_and_tool_uses_each_have_their_block() -> None:
    calls = [CallDelta(0, "call_a", "f", "", 0), CallDelta(0, "", "", '{"x"', 0)]
    more = [CallDelta(0, "", "", ":1}", 4), CallDelta(1, "call_b", "g", "", 0)]
    deltas = [
        delta(reasoning="I th"),
        delta("So", reasoning="ink"),
        delta(":", calls=calls),
        delta(calls=more),
    ]
    message = streamed(deltas, "tool_calls")
    thinking, text, first, second = message["content"]
    assert (thinking["thinking"], text["text"]) == ("I think", "So:")
    assert (first["name"], first["input"], second["id"], second["input"]) == ("f", {"x": 1}, "call_b", {})
    assert message["stop_reason"] == "tool_use"
    whole = [CallDelta(0, "call_a", "f", '{"x":1}', 0), CallDelta(1, "call_b", "g", "", 0)]
    assert shape().whole([Whole("So:", [], "tool_calls", "I think", whole)], USAGE) == message


def test_nothing_said_is_no_block() -> None:
    assert streamed([delta()], "stop")["content"] == []


@pytest.mark.parametrize("arguments", ['{"x": ', "[1]", "what"])
def test_arguments_that_are_no_object_are_not_lost(arguments: str) -> None:
    whole = Whole("", [], "length", calls=[CallDelta(0, "c", "f", arguments, 0)])
    body = shape().whole([whole], USAGE)
    strict(Message, body)
    assert body["content"][0]["input"] == {UNPARSED: arguments}


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (400, "invalid_request_error", 400), (401, "authentication_error", 401),
        (403, "permission_error", 403), (404, "not_found_error", 404), (405, "invalid_request_error", 405),
        (429, "rate_limit_error", 429), (500, "api_error", 500), (503, "overloaded_error", 529),
        (504, "timeout_error", 504),
    ],
)  # fmt: skip
def test_errors(status: int, kind: str, told: int) -> None:
    body = errors.error(status, "words", "req")
    assert body == {"type": "error", "error": {"type": kind, "message": "words"}, "request_id": "req"}
    assert (strict(ErrorResponse, body).error.type, errors.status_of(status)) == (kind, told)


@pytest.mark.parametrize("error", [internal(), HttpError(503, "gone")])
def test_a_failure_amid_the_stream_is_an_error_event(error: HttpError) -> None:
    made = shape()
    frame = made.frame(made.failed(error)).decode()
    name, data, *rest = frame.split("\n")
    assert (name, rest) == ("event: error", ["", ""])
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == error.message


def test_plain_text_can_be_written_without_its_handler() -> None:
    made = shape()
    made.first(0)
    assert made.around(0) is None
    made.text(0, delta("a"))
    around = made.around(0)
    assert around is not None
    for words in ("b", '"text":"', "é\u2028\n"):
        written = around[0] + json.dumps(words, ensure_ascii=False).encode() + around[1]
        assert named_events(written) == named_events(b"".join(map(made.frame, made.text(0, delta(words)))))
    made.text(0, delta(calls=[CallDelta(0, "c", "f", "", 0)]))
    assert made.around(0) is None
