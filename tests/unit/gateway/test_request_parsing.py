"""A body's bytes -> a typed request: whatever is wrong is a 400 that names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import Code, RequestError
from baton_services.gateway.parse import parse, unknown_fields
from baton_services.gateway.schema import ChatRequest, CompletionRequest

OK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> bytes:
    return json.dumps({**OK, **fields}).encode()


def refusal(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, ChatRequest)
    assert caught.value.failure.code is Code.INVALID_REQUEST
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b" \n", None),
        (b"{nope", None),
        (b"[]", None),
        (b"null", None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "m"}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model"),
        (chat(model=5), "model"),
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (chat(messages=[3]), "messages[0]"),
        (chat(messages=[{"content": "x"}]), "messages[0].role"),
        (chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
        (chat(messages=[{"role": None, "content": "x"}]), "messages[0].role"),
        (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": [{"text": "x"}]}]), "messages[0].content[0].type"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens=1.5), "max_tokens"),
        (chat(max_tokens="5"), "max_tokens"),
        (chat(max_tokens=True), "max_tokens"),
        (chat(max_tokens=10**30), "max_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
        (chat(temperature=float("nan")), "temperature"),
        (chat(temperature=float("inf")), "temperature"),
        (chat(temperature=9), "temperature"),
        (chat(top_p=1.1), "top_p"),
        (chat(n=0), "n"),
        (chat(n=129), "n"),
        (chat(seed=10**40), "seed"),
        (chat(top_k=10**20), "top_k"),
        (chat(logit_bias={"1": 101}), "logit_bias"),
        (chat(logit_bias=[1]), "logit_bias"),
        (chat(stop=3), "stop"),
        (chat(stop=[3]), "stop[0]"),
        (chat(stream="yes"), "stream"),
        (chat(top_logprobs=21), "top_logprobs"),
        (chat(metadata={"a": 1}), "metadata"),
        (chat(messages=[{"role": "user", "content": "a\ud800b"}]), "messages[0].content"),
        (chat(stop=["\udfff"]), "stop[0]"),
        (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "messages[0]"),
        (chat()[:-1] + b', "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", None),
    ],
)
def test_what_is_wrong_is_named(body: bytes, param: str | None) -> None:
    failure = refusal(body).failure
    assert failure.param == param
    assert failure.message.startswith(f"{param}: " if param else "the body")


def test_a_slip_in_a_large_body_is_refused_without_a_second_reading() -> None:
    body = chat(messages=[{"role": "user", "content": "x" * 2**20 + "\ud800"}])
    assert refusal(body).failure.param is None


NULLABLE = sorted({*ChatRequest.__struct_fields__} - {"model", "messages"})


@pytest.mark.parametrize("field", NULLABLE)
def test_null_means_absent(field: str) -> None:
    assert getattr(parse(chat(**{field: None}), ChatRequest), field) is None


def test_duplicate_keys_the_last_one_counts() -> None:
    body = b'{"model": "a", "model": "b", "messages": [{"role": "user", "content": "x"}]}'
    assert parse(body, ChatRequest).model == "b"


def test_unknown_fields_are_listed_and_known_ones_are_not() -> None:
    body = chat(foo=1, moderation={}, store=True, guided_json={}, **{"b" * 90: None})
    assert unknown_fields(body, ChatRequest) == ["foo", "b" * 90]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(sorted(CompletionRequest.__struct_fields__)), json_values, max_size=6),
    st.booleans(),
)
def test_any_json_is_taken_or_refused_by_name(fields: dict[str, Any], ascii_only: bool) -> None:
    body = json.dumps({"model": "m", "prompt": "x", **fields}, ensure_ascii=ascii_only)
    try:
        parse(body.encode(errors="surrogatepass"), CompletionRequest)
    except RequestError as error:
        assert error.failure.code is Code.INVALID_REQUEST
        error.failure.message.encode()


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse(body, ChatRequest)
