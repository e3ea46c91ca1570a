"""Bodies that come slowly, too many at once, or not at all: on a real server, with short limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from baton.protocol.errors import RequestError
from baton_services.gateway.body import BODIES, Bodies, expect, read_json
from baton_services.gateway.errors import HttpError

JSON = {"Content-Type": "application/json"}


async def echo(http: web.Request) -> web.Response:
    try:
        return web.json_response({"read": len(await read_json(http))})
    except HttpError as error:
        return error.response()
    except RequestError as error:
        return HttpError.of(error.failure).response()


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    app = web.Application()
    app[BODIES] = Bodies(limit=1_000, limit_held=2**20, idle_s=5.0, total_s=10.0)
    app.router.add_post("/", echo, expect_handler=expect)
    async with TestServer(app) as server:
        yield server
    assert app[BODIES].held == 0


async def post(server: TestServer, data: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    async with (
        ClientSession() as session,
        session.post(server.make_url("/"), data=data, headers={**JSON, **headers}) as answer,
    ):
        return answer.status, json.loads(await answer.read())


async def slowly(pause: float, pieces: int = 3) -> AsyncIterator[bytes]:
    for _ in range(pieces):
        await asyncio.sleep(pause)
        yield b"x" * 10


async def test_a_body_is_read_whole(server: TestServer) -> None:
    assert await post(server, b"x" * 1_000) == (200, {"read": 1_000})
    assert await post(server, slowly(0.01)) == (200, {"read": 30})
    assert await post(server, b"") == (200, {"read": 0})


async def test_one_byte_more_is_too_large(server: TestServer) -> None:
    status, answer = await post(server, b"x" * 1_001)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    status, answer = await post(server, slowly(0.0, pieces=101))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_what_is_compressed_counts_unpacked(server: TestServer) -> None:
    import zlib

    packed = zlib.compress(b"x" * 100_000)
    assert len(packed) < 1_000
    status, answer = await post(server, packed, **{"Content-Encoding": "deflate"})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    packed = zlib.compress(b"x" * 900)
    assert await post(server, packed, **{"Content-Encoding": "deflate"}) == (200, {"read": 900})


async def test_a_body_that_stops_coming(server: TestServer) -> None:
    server.app[BODIES].idle_s = 0.05
    status, answer = await post(server, slowly(0.5))
    assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_a_body_that_takes_for_ever(server: TestServer) -> None:
    server.app[BODIES].total_s = 0.1
    status, answer = await post(server, slowly(0.03, pieces=20))
    assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_too_many_at_once(server: TestServer) -> None:
    server.app[BODIES].limit_held = 50
    first = asyncio.create_task(post(server, slowly(0.1, pieces=4)))
    await asyncio.sleep(0.25)
    status, answer = await post(server, b"x" * 40)
    assert (status, answer["error"]["code"]) == (429, "server_is_overloaded")
    assert await first == (200, {"read": 40})
