"""Responses that are stored or under way: gone on from, found, deleted, cancelled, by whom they may be."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseItemList
from openai_types import strict
from rawhttp import send
from running import BATON, Running

from baton.config.environ import to_environ
from baton.config.keys import KeyEntry, add, digest
from baton.config.settings import Settings

PATH = "/v1/responses"
GREEDY: Any = {"model": "mock", "temperature": 0, "max_output_tokens": 20}
LONG: Any = {"model": "mock", "input": "long", "stream": True, "extra_body": {"seed": 1}}
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
USER: Any = {"role": "user", "content": "x"}


@pytest.fixture
def client(shared_baton: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared_baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


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
    made = client.responses.create(**GREEDY, input="keep", tools=[TOOL], metadata={"a": "b"})
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
