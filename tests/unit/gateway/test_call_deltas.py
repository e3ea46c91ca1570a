"""Tool calls and reasoning on their way through the gateway: taken once whatever is cut, repeated or lost."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from baton.protocol.request import CallDelta, Generate, TextDelta, Usage
from baton_services.gateway.answers import Answers
from baton_services.gateway.build import Plan
from baton_services.gateway.exchange import Exchange
from baton_services.gateway.shapes import Chat

WANTED = ("thoughts", "text", [("call_a", "f", '{"a": [1, 2]}'), ("call_b", "g", "{}")])
USAGE = Usage(prompt_tokens=3, completion_tokens=4)


def deltas_of(sizes: list[int]) -> list[TextDelta]:
    """A tokenizer's deltas for what is wanted, cut at these sizes."""
    reasoning, text, calls = WANTED
    units: list[tuple[str, int, str]] = [("reasoning", 0, char) for char in reasoning]
    units += [("text", 0, char) for char in text]
    for index, (_, _, arguments) in enumerate(calls):
        units += [("begin", index, ""), *(("piece", index, char) for char in arguments)]
    out: list[TextDelta] = []
    written = reasoned = 0
    lengths: dict[int, int] = {}
    sizes = list(sizes)
    while units:
        size = sizes.pop(0) if sizes else 3
        called = len(lengths) + sum(lengths.values())
        delta = TextDelta("r", written, "", reasoning_start=reasoned, calls_start=called)
        for kind, index, char in units[:size]:
            if kind == "reasoning":
                delta.reasoning, reasoned = delta.reasoning + char, reasoned + 1
            elif kind == "text":
                delta.text, written = delta.text + char, written + 1
            elif kind == "begin":
                lengths[index] = 0
                delta.calls.append(CallDelta(index, calls[index][0], calls[index][1], "", 0))
            else:
                if not (delta.calls and delta.calls[-1].index == index):
                    delta.calls.append(CallDelta(index, "", "", "", lengths[index]))
                delta.calls[-1].arguments += char
                lengths[index] += 1
        units = units[size:]
        out.append(delta)
    last = TextDelta("r", written, "", finish="tool_calls", usage=USAGE, reasoning_start=reasoned)
    last.calls_start = len(lengths) + sum(lengths.values())
    out.append(last)
    return out


def exchange() -> Exchange:
    return Exchange(Generate(request="r", model="m", reply_to="s"), deadline=1e18)


def whole(deltas: list[TextDelta]) -> dict[str, Any]:
    """The answer as a client gets it, not streamed; valid for the official client's types."""
    answers = Answers(Plan([[Generate(request="r", model="m", reply_to="s")]], 1))
    for delta in deltas:
        answers.take(0, delta)
    body = Chat("r", "m", logprobs=False).whole(answers.chosen(), answers.usage())
    ChatCompletion.model_validate(body, strict=True)
    message: dict[str, Any] = body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    return message


def joined(deltas: list[TextDelta]) -> dict[str, Any]:
    """The answer that a client puts together from a stream: id, name and role once."""
    shape = Chat("r", "m", logprobs=False)
    message: dict[str, Any] = {"calls": {}}
    chunks = shape.first(0, deltas[0])
    for delta in deltas:
        chunks += shape.text(0, delta)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        delta = chunk["choices"][0]["delta"]
        for name in ("role", "content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["function"]["arguments"] == ""
                message["calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
            else:
                message["calls"][call["index"]][2] += call["function"]["arguments"]
    return message


sizes = st.lists(st.integers(1, 9), max_size=12)


@settings(max_examples=150, deadline=None)
@given(sizes, sizes, st.data())
def test_taken_once_whatever_happens(first: list[int], second: list[int], data: st.DataObject) -> None:
    """A tokenizer dies at any point; the next one begins again, cut otherwise; some deltas come twice."""
    subject, taken = exchange(), []
    sent = deltas_of(first)
    dies = data.draw(st.integers(0, len(sent) - 1), label="dies")
    for delta in [*sent[:dies], *deltas_of(second)]:
        for _ in range(data.draw(st.integers(1, 2), label="copies")):
            subject.put(copy.deepcopy(delta))
        if data.draw(st.booleans(), label="take"):
            while (found := subject.take()) is not None:
                taken.append(found)
    while (found := subject.take()) is not None:
        taken.append(found)
    assert not subject.gap
    assert subject.over
    message = whole(copy.deepcopy(taken))
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message["tool_calls"]
    ]
    assert (message["reasoning_content"], message["content"], calls) == WANTED
    streamed = joined(taken)
    assert [tuple(call) for call in streamed["calls"].values()] == WANTED[2]
    assert (streamed["reasoning"], streamed["content"], streamed["role"]) == ("thoughts", "text", "assistant")


@settings(max_examples=100, deadline=None)
@given(sizes, st.data())
def test_what_is_lost_is_noticed(first: list[int], data: st.DataObject) -> None:
    sent = deltas_of(first)
    lost = data.draw(st.integers(0, len(sent) - 2), label="lost")
    subject = exchange()
    for number, delta in enumerate(sent):
        if number != lost:
            subject.put(delta)
    assert subject.gap


def test_content_is_null_where_there_are_only_calls() -> None:
    delta = TextDelta("r", 0, "", calls=[CallDelta(0, "call_a", "f", "{}", 0)])
    last = TextDelta("r", 0, "", finish="tool_calls", usage=USAGE)
    assert whole([delta, last])["content"] is None
    delta = TextDelta("r", 0, "", calls=[CallDelta(0, "call_a", "f", "{}", 0)])
    assert Chat("r", "m", logprobs=False).first(0, delta)[0]["choices"][0]["delta"]["content"] is None
