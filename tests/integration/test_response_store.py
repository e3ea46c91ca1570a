"""Stored responses on a real JetStream: found by their owner alone, bounded, gone when they should be."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.bus.connection import Bus
from baton.bus.server import EmbeddedServer
from baton.bus.stored import Streams
from baton.config.settings import BusSettings
from baton.protocol.errors import RequestError
from baton_services.gateway.errors import HttpError
from baton_services.gateway.responses import store as store_module
from baton_services.gateway.responses.items import output_text
from baton_services.gateway.responses.store import MAX_INPUT, STREAM, Record, ResponseStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One of its own: there is one bucket a server."""
    server = EmbeddedServer()
    yield server
    server.stop()


@pytest.fixture
async def bus(server: EmbeddedServer, tmp_path: Path) -> Any:
    url = server.start(tmp_path, user="u", password="p")
    bus = await Bus.connect(BusSettings(url=url, user="u", password="p"), name="store", wait_s=10)
    yield bus
    await bus.close()


def record(text: str = "hi", **part: Any) -> Record:
    content = [{**output_text(text), **part}]
    message = {"type": "message", "id": "msg", "content": content}
    return Record({"id": f"resp_{uuid.uuid4().hex}", "output": [message]}, [{"id": "in"}])


async def test_only_its_owner_finds_and_deletes_it(bus: Bus) -> None:
    store = ResponseStore(bus, megabytes=8, ttl_s=60)
    mine, common = record("😀"), record()
    await store.put("ab" * 16, mine)
    await store.put("", common)
    assert await store.get("ab" * 16, mine.response["id"]) == mine
    assert await store.get("", common.response["id"]) == common
    for owner, id_ in (
        ("", mine.response["id"]), ("cd" * 16, mine.response["id"]), ("ab" * 16, common.response["id"]),
        ("", "resp_>"), ("", "*"), ("ab" * 16, "resp_" + "0" * 32),
    ):  # fmt: skip
        assert await store.get(owner, id_) is None
    await store.delete("", mine.response["id"])
    assert await store.get("ab" * 16, mine.response["id"]) == mine
    await store.delete("ab" * 16, mine.response["id"])
    assert await store.get("ab" * 16, mine.response["id"]) is None
    kept = await Streams(bus).page(STREAM, "$KV.>")
    assert [item.subject.rsplit(".", 1)[1] for item in kept] == [common.response["id"]]


async def test_the_oldest_make_room(bus: Bus) -> None:
    store = ResponseStore(bus, megabytes=2, ttl_s=60)
    records = [record("x" * 900_000) for _ in range(4)]
    for each in records:
        await store.put("", each)
    found = [await store.get("", each.response["id"]) is not None for each in records]
    assert found == [False, False, True, True]


async def test_settings_that_change_and_a_bucket_that_is_lost(bus: Bus) -> None:
    first, second = record(), record()
    await ResponseStore(bus, megabytes=2, ttl_s=60).put("", first)
    store = ResponseStore(bus, megabytes=4, ttl_s=600)
    assert await store.get("", first.response["id"]) == first
    await Streams(bus)._call(f"STREAM.DELETE.{STREAM}", {})
    await store.put("", second)
    assert await store.get("", second.response["id"]) == second


async def test_a_response_has_its_size(bus: Bus) -> None:
    store = ResponseStore(bus, megabytes=64, ttl_s=60)
    entries = [{"token": "x" * 100, "logprob": -1.0, "bytes": [1], "top_logprobs": []}] * 40_000
    large = record("text", logprobs=entries)
    await store.put("", large)
    found = await store.get("", large.response["id"])
    assert found is not None
    part = found.response["output"][0]["content"][0]
    assert (part["text"], part["logprobs"]) == ("text", [])
    assert large.response["output"][0]["content"][0]["logprobs"] == entries
    store.check(record())
    with pytest.raises(RequestError) as refused:
        store.check(record("x" * MAX_INPUT))
    assert refused.value.failure.param == "store"


async def test_without_jetstream_it_says_so(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PAUSE_S", 0.1)
    url = server.start(tmp_path, user="u", password="p", jetstream=False)
    bus = await Bus.connect(BusSettings(url=url, user="u", password="p"), name="store", wait_s=10)
    try:
        store = ResponseStore(bus, megabytes=8, ttl_s=60)
        with pytest.raises(HttpError) as refused:
            await store.ready()
        assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
        assert await ResponseStore(bus, megabytes=0, ttl_s=60).get("", "resp_" + "0" * 32) is None
    finally:
        await bus.close()
