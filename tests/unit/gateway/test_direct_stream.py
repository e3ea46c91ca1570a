"""The short way of a stream's text: the same bytes, in the same order, as the handler would write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.request import Generate, TextDelta
from baton_services.gateway import shapes
from baton_services.gateway.choices import Choices
from baton_services.gateway.exchange import Exchange
from baton_services.gateway.exchanges import Exchanges

MODELS = ["mock", '"text":""', '{"content":""}', "\\"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(texts, st.sampled_from(MODELS), st.booleans(), st.integers(0, 3))
def test_prepared_bytes_around_a_text_are_its_frame(text: str, model: str, counted: bool, index: int) -> None:
    for shape in (
        shapes.Chat("id", model, logprobs=False, counted=counted),
        shapes.Completion("id", model, logprobs=None),
    ):
        prepared = shape.around(index)
        assert prepared is not None
        made = prepared[0] + shapes._encode(text or "x") + prepared[1]
        assert made == b"".join(map(shapes.frame, shape.text(index, TextDelta("r", 0, text or "x"))))


@pytest.mark.parametrize(
    "shape", [shapes.Chat("id", "m", logprobs=True), shapes.Completion("id", "m", logprobs=0)]
)
def test_with_logprobs_nothing_is_prepared(shape: shapes.Chat | shapes.Completion) -> None:
    assert shape.around(0) is None


class Opened:
    """Stands for `Exchanges`: opens, and keeps what it opened."""

    def __init__(self) -> None:
        self.live: list[Exchange] = []

    async def open(self, choices: list[Generate], wakes: list[Callable[[], None]]) -> list[Exchange]:
        opened = [Exchange(each, 1e9, wake=wake) for each, wake in zip(choices, wakes, strict=True)]
        self.live += opened
        return opened


async def test_taken_only_while_the_handler_waits_with_nothing_left_to_write() -> None:
    opened, direct = Opened(), list[str]()
    takes = True

    def sink(index: int, delta: TextDelta) -> bool:
        if takes:
            direct.append(delta.text)
        return takes

    choices = Choices(cast(Exchanges, opened), [[Generate(request="r", model="m", reply_to="t", prompt="p")]])
    await choices.open()
    (exchange,) = opened.live
    choices.sink = sink
    characters = 0

    def put(text: str, **end: Any) -> None:
        nonlocal characters
        exchange.put(TextDelta("r", characters, text, **end))
        characters += len(text)

    put("a")  # nobody waits yet
    assert (await choices.next())[1].text == "a"
    put("b")  # the handler is still writing "a"
    assert direct == []
    assert (await choices.next())[1].text == "b"

    waiting = asyncio.create_task(choices.next())
    await asyncio.sleep(0)
    put("c")
    put("d")
    assert direct == ["c", "d"] and not waiting.done()
    takes = False
    put("e")  # the client has become slow
    takes = True
    put("f")  # must not overtake it
    assert (await waiting)[1].text == "ef"
    assert direct == ["c", "d"]
    put("", finish="stop")
    assert (await choices.next())[1].finish == "stop"
