"""The Responses API through the official client: answers, streams, tools, forms, and what is stored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_streams import check_responses, named_events
from openai import OpenAI
from openai.types.responses import Response, ResponseItemList
from openai_types import strict
from pydantic import BaseModel, Field
from rawhttp import dechunked, send
from running import BATON, Running

from baton.config.environ import to_environ
from baton.config.keys import KeyEntry, add, digest
from baton.config.settings import Settings

PATH = "/v1/responses"
GREEDY: Any = {"model": "mock", "temperature": 0, "max_output_tokens": 20}
LONG: Any = {"model": "mock", "input": "long", "stream": True, "extra_body": {"seed": 1}}
WEATHER: Any = {
    "type": "function", "name": "weather", "description": "tells it", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    people: int = Field(ge=0, le=99)


@pytest.fixture
def client(shared_baton: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared_baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def body_of(baton: Running, **fields: Any) -> Any:
    status, body = baton.post(PATH, {**GREEDY, **fields})
    assert status == 200, body
    strict(Response, body)
    return body


def events_of(baton: Running, **fields: Any) -> list[Any]:
    answer = send(
        baton.url, "POST", PATH, json.dumps({**GREEDY, "stream": True, **fields}).encode(),
        {"Accept-Encoding": "identity"},
    )  # fmt: skip
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return named_events(dechunked(answer.body))


def test_a_text_is_answered_like_a_chat_of_one_turn(client: OpenAI) -> None:
    answer = client.responses.create(**GREEDY, instructions="Be brief.", input="Où est Paris ? 😀")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Où est Paris ? 😀"},
    ]
    chat = client.chat.completions.create(model="mock", messages=messages, max_tokens=20, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert chat.usage and answer.usage
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert (answer.status, answer.usage.output_tokens) == ("incomplete", 20)
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.id.startswith("resp_")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "hi", "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200},
        {"input": "hi", "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False},
        {"input": [{"role": "user", "content": "hi"}], "text": {"format": {"type": "json_object"}}},
        {"input": "hi", "store": False, "metadata": {"k": "v"}, "user": "u", "safety_identifier": "s"},
        {"input": "hi", "temperature": 1.0, "top_p": 0.9, "seed": 5, "top_k": 40},
    ],
    ids=str,
)
def test_streamed_it_is_the_same(shared_baton: Running, fields: Any) -> None:
    whole = body_of(shared_baton, **fields)
    last = check_responses(events_of(shared_baton, **fields))
    for name in ("output", "text", "tools", "tool_choice", "status", "metadata"):
        assert _nameless(last[name]) == _nameless(whole[name])
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def _nameless(value: Any) -> Any:
    """Without ids, which are each answer's own."""
    if isinstance(value, list):
        return [_nameless(item) for item in value]
    if isinstance(value, dict):
        return {key: _nameless(item) for key, item in value.items() if key not in ("id", "call_id")}
    return value


@pytest.mark.parametrize("seed", range(2))
def test_parsed(client: OpenAI, seed: int) -> None:
    fields: Any = {"model": "mock", "input": "Which?", "temperature": 1.0, "extra_body": {"seed": seed}}
    parsed = client.responses.parse(**fields, text_format=City).output_parsed
    assert isinstance(parsed, City)
    with client.responses.stream(**fields, text_format=City) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed and final.status == "completed"


def test_a_tool_is_called_and_its_result_read(client: OpenAI) -> None:
    fields: Any = {"model": "mock", "tools": [WEATHER], "max_output_tokens": 100, "temperature": 0}
    choice: Any = {"type": "function", "name": "weather"}
    first = client.responses.create(input="Weather?", tool_choice=choice, **fields)
    (call,) = first.output
    assert call.type == "function_call" and first.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain 😀"}
    linked = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **fields
    )
    told: Any = [{"role": "user", "content": "Weather?"}, call.to_dict(), result]
    spelled = client.responses.create(input=told, tool_choice="none", **fields)
    assert linked.output_text == spelled.output_text
    assert linked.usage and spelled.usage
    assert linked.usage.input_tokens == spelled.usage.input_tokens


def test_a_conversation_goes_on_from_what_is_stored(shared_baton: Running, client: OpenAI) -> None:
    first = client.responses.create(**GREEDY, instructions="Only here.", input="one")
    second = client.responses.create(**GREEDY, input="two", previous_response_id=first.id)
    third = client.responses.create(**GREEDY, input="three", previous_response_id=second.id)
    told: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "three"},
    ]
    spelled = client.responses.create(**GREEDY, input=told, store=False)
    assert third.output_text == spelled.output_text
    listed = client.responses.input_items.list(third.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed] == [  # type: ignore[union-attr]
        item["content"] for item in told
    ]
    _, page = shared_baton.get(f"{PATH}/{third.id}/input_items")
    assert strict(ResponseItemList, page).has_more is False
    count = client.responses.input_tokens.count(model="mock", input=told)
    assert third.usage and count.input_tokens == third.usage.input_tokens


def test_what_is_stored_is_found_and_deleted(shared_baton: Running, client: OpenAI) -> None:
    made = client.responses.create(**GREEDY, input="keep", tools=[WEATHER], metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    _, body = shared_baton.get(f"{PATH}/{made.id}")
    strict(Response, body)
    streamed = list(client.responses.create(**GREEDY, input="keep", stream=True))[-1]
    assert streamed.type == "response.incomplete"
    assert client.responses.retrieve(streamed.response.id) == streamed.response
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(made.id)
    assert gone.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**GREEDY, input="x", previous_response_id=made.id)
    assert (unknown.value.code, unknown.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    unkept = client.responses.create(**GREEDY, input="forget", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


class Gateway:
    """One more gateway of a running Baton, with keys."""

    def __init__(self, baton: Running, folder: Path, name: str) -> None:
        settings = Settings(bus=baton.bus)
        settings.gateway.port, settings.gateway.keys_file = 0, str(folder / "keys.toml")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*BATON, "serve", "gateway", "--id", f"gateway-{name}"],
                env={**clean, **to_environ(settings)}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_ready(self) -> str:
        """Its URL."""
        until = time.monotonic() + 30
        while (found := re.search(r"listening on (http://\S+)", self._log.read_text())) is None:
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.05)
        while send(found[1], "GET", "/ready").status != 200:
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.05)
        return found[1]

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0
        assert "Traceback" not in self._log.read_text()


@pytest.fixture(scope="module")
def keyed(shared_baton: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of two more gateways, which ask for the key of ann or ben."""
    folder = tmp_path_factory.mktemp("keyed")
    for name in ("ann", "ben"):
        add(folder / "keys.toml", name, KeyEntry(sha256=digest(name)))
    gateways = [Gateway(shared_baton, folder, name) for name in ("one", "two")]
    yield [gateway.wait_ready() for gateway in gateways]
    for gateway in gateways:
        gateway.stop()


def with_key(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_every_gateway_has_it_and_only_its_own_key_reads_it(client: OpenAI, keyed: list[str]) -> None:
    ann, ben = with_key(keyed[0], "ann"), with_key(keyed[0], "ben")
    anns = ann.responses.create(**GREEDY, input="mine")
    common = client.responses.create(**GREEDY, input="anybody's")
    for url in keyed:
        assert with_key(url, "ann").responses.retrieve(anns.id) == anns
    for other in (ben, client):
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(anns.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**GREEDY, input="x", previous_response_id=anns.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.delete(common.id)


def test_a_stream_is_cancelled_by_another_gateway(client: OpenAI, keyed: list[str]) -> None:
    ann, ben = with_key(keyed[0], "ann"), with_key(keyed[0], "ben")
    for streams, cancels in ((client, client), (ann, with_key(keyed[1], "ann"))):
        stream = iter(streams.responses.create(**LONG))
        begun: Any = next(stream)
        for other in {client, ann, ben} - {streams}:
            with pytest.raises(openai.NotFoundError):
                other.responses.cancel(begun.response.id)
        ended = cancels.responses.cancel(begun.response.id)
        last: Any = list(stream)[-1]
        assert (ended.status, last.type) == ("cancelled", "response.incomplete")
        assert last.response == ended == streams.responses.retrieve(ended.id)
        assert ended.usage and 0 < ended.usage.output_tokens == len(ended.output_text)
        assert cancels.responses.cancel(ended.id) == ended
    done = client.responses.create(**GREEDY, input="x")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(done.id)


def test_the_oldest_items_are_dropped_where_all_do_not_fit(client: OpenAI) -> None:
    turns: Any = [
        {"role": ("user", "assistant")[number % 2], "content": f"{number} " + "y" * 400}
        for number in range(21)
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**GREEDY, input=turns)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    fitted = client.responses.create(**GREEDY, input=turns, truncation="auto")
    assert fitted.usage and 3_500 < fitted.usage.input_tokens <= 4_076
    spelled = [client.responses.create(**GREEDY, input=turns[number:]) for number in range(12, 14)]
    assert fitted.output_text in [answer.output_text for answer in spelled]


USER: Any = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]},
         "input[1].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}},
         "tool_choice.name"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
            "text.format.schema",
        ),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "include": ["everything"]}, "include[0]"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "max_output_tokens": 5_000}, "input"),
        ({"input": "x" * 9_000}, "input"),
        ({"input": "x", "previous_response_id": "resp_x.>"}, "previous_response_id"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(shared_baton: Running, fields: Any, param: str) -> None:
    status, body = shared_baton.post(PATH, {"model": "mock", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nope", 404), ("/resp_*", 404), ("/resp_..", 404), ("/resp_%00", 404), ("/resp_x?stream=true", 400),
        ("/resp_x/input_items", 404), ("/resp_x/other", 404),
    ],
)  # fmt: skip
def test_ids_that_are_none(shared_baton: Running, path: str, status: int) -> None:
    assert shared_baton.get(PATH + path)[0] == status


def test_pages_of_items(shared_baton: Running, client: OpenAI) -> None:
    made = client.responses.create(**GREEDY, input=[USER, USER, USER])
    place = f"{PATH}/{made.id}/input_items"
    _, first = shared_baton.get(f"{place}?limit=2&order=asc")
    assert (len(first["data"]), first["has_more"]) == (2, True)
    _, rest = shared_baton.get(f"{place}?limit=2&order=asc&after={first['last_id']}")
    assert (len(rest["data"]), rest["has_more"]) == (1, False)
    _, none = shared_baton.get(f"{place}?after={first['first_id']}")
    assert (none["data"], none["first_id"]) == ([], "")
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ):
        status, body = shared_baton.get(f"{place}?{query}")
        assert (status, body["error"]["param"]) == (400, param)
