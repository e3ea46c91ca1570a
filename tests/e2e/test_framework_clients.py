"""langchain-openai and instructor against a running Baton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from openai import OpenAI as Client
from pydantic import BaseModel, Field, SecretStr
from running import Running


class Person(BaseModel):
    """Somebody. Its required fields are not in the order of its properties."""

    age: int = Field(ge=0, le=120)
    name: str = Field(max_length=10)
    mood: Literal["glad", "sad"] = "glad"


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Oslo", "Rome"]


def chain(baton: Running, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="mock", base_url=f"{baton.url}/v1", api_key=SecretStr("none"), max_retries=0, **fields
    )


@pytest.fixture
def client(shared_baton: Running) -> Iterator[Client]:
    with Client(base_url=f"{shared_baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_chats(shared_baton: Running, responses: bool) -> None:
    model = chain(
        shared_baton, max_completion_tokens=24, temperature=0, use_responses_api=responses, stream_usage=True
    )
    turns = [SystemMessage("Be brief."), HumanMessage("hi"), AIMessage("ho"), HumanMessage("again")]
    answer = model.invoke(turns)
    assert answer.text
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] == 24
    streamed = None
    for chunk in model.stream(turns):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed and streamed.text == answer.text
    assert streamed.usage_metadata and streamed.usage_metadata["output_tokens"] == 24


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_calls_tools(shared_baton: Running, responses: bool) -> None:
    model = chain(shared_baton, temperature=0, use_responses_api=responses, max_completion_tokens=300)
    bound = model.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage("Weather?")
    called = bound.invoke([asked])
    (call,) = called.tool_calls
    assert call["name"] == "Weather" and call["args"]["city"] in ("Oslo", "Rome")
    told = model.bind(max_completion_tokens=9).invoke(
        [asked, called, ToolMessage("rain", tool_call_id=call["id"])]
    )
    assert told.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures(shared_baton: Running, method: Any) -> None:
    model = chain(shared_baton, temperature=1.0, seed=3)
    assert isinstance(model.with_structured_output(Person, method=method).invoke("Who?"), Person)


def test_langchain_completes(shared_baton: Running) -> None:
    model = OpenAI(
        model="mock",
        base_url=f"{shared_baton.url}/v1",
        api_key=SecretStr("none"),
        max_tokens=8,
        temperature=0,
    )
    text = model.invoke("Once")
    assert len(text) == 8 and "".join(model.stream("Once")) == text


@pytest.mark.parametrize(
    "mode",
    [
        instructor.Mode.TOOLS,
        instructor.Mode.JSON_SCHEMA,
        instructor.Mode.RESPONSES_TOOLS,
    ],
    ids=str,
)
def test_instructor(client: Client, mode: instructor.Mode) -> None:
    asking = instructor.from_openai(client, mode=mode)
    person = asking.create(
        model="mock", messages=[{"role": "user", "content": "Who?"}], response_model=Person, max_retries=0
    )
    assert isinstance(person, Person)


def test_instructor_partial(client: Client) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    grown = list(
        asking.create_partial(
            model="mock", messages=[{"role": "user", "content": "Who?"}], response_model=Person, max_retries=0
        )
    )
    assert len(grown) > 1 and Person.model_validate(grown[-1].model_dump())
