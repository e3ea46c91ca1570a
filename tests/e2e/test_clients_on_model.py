"""The same clients on the default model and engine: what they get is the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import pytest
from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field, SecretStr
from running import Running

MODEL = "smollm2-135m-instruct"
ASKED = "What is the capital of France?"

pytestmark = pytest.mark.slow


class City(BaseModel):
    """A city."""

    country: Literal["France", "Italy"]
    name: str = Field(max_length=12)


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture
def client(baton: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_all_ways_of_asking_get_one_answer(baton: Running, client: OpenAI) -> None:
    turns: Any = [{"role": "user", "content": ASKED}]
    chat = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=40, temperature=0)
    text = chat.choices[0].message.content
    assert text and "Paris" in text
    answer = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=40, temperature=0)
    assert answer.output_text == text
    with client.responses.stream(model=MODEL, input=ASKED, max_output_tokens=40, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert len(pieces) > 1 and "".join(pieces) == text
    anthropics = Anthropic(base_url=baton.url, api_key="none", max_retries=0)
    fields: Any = {"model": MODEL, "max_tokens": 40, "messages": turns, "extra_body": {"temperature": 0}}
    with anthropics.messages.stream(**fields) as events:
        assert "".join(events.text_stream) == text
    message = anthropics.messages.create(**fields)
    assert [block.text for block in message.content] == [text]  # type: ignore[union-attr]
    assert message.stop_reason == ("end_turn" if chat.choices[0].finish_reason == "stop" else "max_tokens")
    chain = ChatOpenAI(
        model=MODEL, base_url=f"{baton.url}/v1", api_key=SecretStr("none"), temperature=0,
        max_completion_tokens=40,
    )  # fmt: skip
    assert chain.invoke(ASKED).text == text


def test_a_conversation_goes_on(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=40, temperature=0)
    fields: Any = {"model": MODEL, "max_output_tokens": 40, "temperature": 0, "input": "And of Italy?"}
    linked = client.responses.create(previous_response_id=first.id, **fields)
    assert linked.usage and first.usage
    assert linked.usage.input_tokens > first.usage.total_tokens
    assert linked.usage.input_tokens_details.cached_tokens > 0


def test_forms_and_tools(baton: Running, client: OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input=ASKED, text_format=City, temperature=0).output_parsed
    assert isinstance(parsed, City)
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    turns: Any = [{"role": "user", "content": ASKED}]
    assert isinstance(asking.create(model=MODEL, messages=turns, response_model=City, max_retries=0), City)
    message = Anthropic(base_url=baton.url, api_key="none", max_retries=0).messages.create(
        model=MODEL, max_tokens=200, messages=turns, tool_choice={"type": "tool", "name": "city"},
        tools=[{"name": "city", "description": "a city", "input_schema": City.model_json_schema()}],
    )  # fmt: skip
    (use,) = message.content
    assert use.type == "tool_use" and City.model_validate(use.input)
