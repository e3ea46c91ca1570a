"""Chunks and bodies against the official client's own types, and the rules of a stream."""

from __future__ import annotations

from typing import Any

import pytest
from openai_types import ChatCompletion, ChatCompletionChunk, Completion, strict
from sse import check_stream, comments, read_chunks, read_events

from baton.protocol.request import Generate, TextDelta, TokenText, Usage
from baton_services.gateway import shapes
from baton_services.gateway.answers import Answers, Tally
from baton_services.gateway.build import Plan

USAGE = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)
EURO = [
    TokenText(b"a\xe2\x82", -0.5, [(b"a\xe2\x82", -0.5), (b"b", -1.5)]),
    TokenText(b"\xac", float("-inf")),
]


def plan(*sizes: int, shown: int | None = None) -> Plan:
    prompts = [
        [Generate(request=f"{prompt}-{choice}", model="m", reply_to="s") for choice in range(size)]
        for prompt, size in enumerate(sizes)
    ]
    return Plan(prompts, shown or sizes[0])


def stream(shape: shapes.Chat | shapes.Completion, *indices: int, counted: bool = True) -> list[Any]:
    chunks = []
    for index in indices:
        chunks += shape.first(index)
    for index in indices:
        chunks += shape.text(index, TextDelta("r", 0, "", tokens=EURO[:1]))
        chunks += shape.text(index, TextDelta("r", 0, "a€", tokens=EURO[1:]))
    for index in indices:
        chunks += shape.last(index, "stop")
    if counted:
        chunks.append(shape.counts(USAGE))
    return chunks


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_chat_chunks(logprobs: bool, counted: bool) -> None:
    shape = shapes.Chat("abc", "m", logprobs=logprobs, counted=counted)
    chunks = stream(shape, 0, 1, counted=counted)
    models = [strict(ChatCompletionChunk, chunk) for chunk in chunks]
    choices = check_stream(chunks, chat=True)
    assert {index: choice.text for index, choice in choices.items()} == {0: "a€", 1: "a€"}
    assert all(choice.finish == "stop" for choice in choices.values())
    assert all(choice.tokens == ("a€".encode() if logprobs else b"") for choice in choices.values())
    first, last = chunks[0]["choices"][0], chunks[-2 if counted else -1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert first["logprobs"] == ({"content": [], "refusal": None} if logprobs else None)
    assert (last["delta"], last["logprobs"], last["finish_reason"]) == ({}, None, "stop")
    assert all(("usage" in chunk) == counted for chunk in chunks)
    if counted:
        assert chunks[0]["usage"] is None
        assert models[-1].usage and models[-1].usage.total_tokens == 7


def test_minus_infinity_is_a_number() -> None:
    shape = shapes.Chat("abc", "m", logprobs=True)
    (chunk,) = shape.text(0, TextDelta("r", 0, "€", tokens=EURO[1:]))
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_chat_body() -> None:
    shape = shapes.Chat("abc", "m", logprobs=True)
    answers = [shapes.Whole("a€", EURO, "stop"), shapes.Whole("", [], "length")]
    body = strict(ChatCompletion, shape.whole(answers, USAGE))
    assert [choice.index for choice in body.choices] == [0, 1]
    assert body.choices[0].message.content == "a€"
    content = body.choices[0].logprobs.content if body.choices[0].logprobs else None
    assert content and b"".join(bytes(token.bytes or []) for token in content) == "a€".encode()
    assert body.usage and body.usage.prompt_tokens_details
    assert body.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_completion_chunks(logprobs: int | None) -> None:
    shape = shapes.Completion("abc", "m", logprobs=logprobs)
    chunks = stream(shape, 0, 1)
    choices = check_stream(chunks, chat=False)
    assert {index: choice.text for index, choice in choices.items()} == {0: "a€", 1: "a€"}
    assert all(choice.logprobs == (0 if logprobs is None else 2) for choice in choices.values())


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_completion_body(logprobs: int | None) -> None:
    shape = shapes.Completion("abc", "m", logprobs=logprobs)
    body = strict(Completion, shape.whole([shapes.Whole("a€", EURO, "stop")], USAGE))
    told = body.choices[0].logprobs
    if logprobs is None:
        assert told is None
        return
    assert told and told.tokens == ["bytes:a\\xe2\\x82".replace("a", "\\x61", 1), "bytes:\\xac"]
    assert told.text_offset == [0, 1]
    assert told.token_logprobs == [-0.5, -9999.0]
    if logprobs:
        assert told.top_logprobs and [len(top) for top in told.top_logprobs] == [2, 1]
    else:
        assert told.top_logprobs is None


def test_frames_are_read_back() -> None:
    shape = shapes.Chat("abc", "m\n\r\u2028é", logprobs=False)
    chunks = stream(shape, 0)
    raw = b"".join(map(shapes.frame, chunks)) + b": note\n\n" + shapes.DONE
    assert read_chunks(raw) == chunks
    assert comments(raw) == ["note"]
    for other in (raw.replace(b"\n", b"\r\n"), raw.replace(b"\n", b"\r")):
        assert read_events(other) == read_events(raw)
    with pytest.raises(ValueError, match="does not end"):
        read_chunks(raw[: -len(shapes.DONE)])
    with pytest.raises(ValueError, match="blank line"):
        read_chunks(raw[:-1])


def end(text: str, prompt: int, completion: int, *logprobs: float, cached: int = 0) -> TextDelta:
    tokens = [TokenText(b"x", value) for value in logprobs]
    counts = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    return TextDelta("r", 0, text, finish="stop", usage=counts, tokens=tokens)


def test_a_prompt_counts_once_and_every_answer_counts() -> None:
    tally = Tally(plan(2, 2))
    for index, delta in enumerate([end("", 5, 1), end("", 5, 2, cached=4), end("", 7, 3), end("", 7, 4)]):
        assert not tally.complete
        tally.take(index, delta)
    assert tally.complete
    assert tally.usage() == Usage(prompt_tokens=12, completion_tokens=10, cached_tokens=0)


def test_the_likeliest_are_shown() -> None:
    answers = Answers(plan(3, shown=2))
    answers.take(0, end("low", 1, 2, -3.0, -3.0))
    answers.take(1, end("high", 1, 1, -1.0))
    answers.take(2, TextDelta("r", 0, "mid"))
    answers.take(2, end("dle", 1, 2, -2.0, -1.0))
    assert [whole.text for whole in answers.chosen()] == ["high", "middle"]
    assert answers.usage().completion_tokens == 5
