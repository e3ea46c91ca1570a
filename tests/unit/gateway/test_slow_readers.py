"""Clients that take nothing: they are cut off after a while, or when memory is short, the largest first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton_services.gateway import readers
from baton_services.gateway.readers import HELD, Readers
from baton_services.gateway.web_app import REQUEST_ID

MEGABYTE = b"x" * 2**20


class Server:
    """Streams for ever, or answers all at once; notes how each ended."""

    def __init__(self, subject: Readers) -> None:
        self.readers = subject
        self.ends: dict[str, BaseException] = {}
        self.port: int | None = None
        self.app = web.Application()
        self.app.router.add_get("/stream/{name}", self.stream)
        self.app.router.add_get("/whole/{size}", self.whole)
        self.app.on_response_prepare.append(subject.add)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        http[REQUEST_ID] = name = http.match_info["name"]
        http[HELD] = lambda: int(http.query.get("held", 0))
        response = web.StreamResponse()
        await response.prepare(http)
        try:
            while True:
                await response.write(MEGABYTE)
        except BaseException as error:
            self.ends[name] = error
            raise

    async def whole(self, http: web.Request) -> web.StreamResponse:
        http[REQUEST_ID] = "whole"
        return web.Response(body=b"x" * int(http.match_info["size"]))


@pytest.fixture
async def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(readers, "LOOK_S", 0.06)
    stalled_s, limit = request.param
    subject = Server(Readers(stalled_s=stalled_s, limit=limit))
    watch = asyncio.create_task(subject.readers.watch())
    async with TestServer(subject.app, handler_cancellation=True) as running:
        subject.port = running.port
        yield subject
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


def asks(server: Server, path: str) -> socket.socket:
    """A client that asks, and does not read."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("server", [(0.3, 2**30)], indirect=True)
async def test_who_takes_nothing_is_cut_off(server: Server) -> None:
    with asks(server, "/stream/a"):
        await until(lambda: "a" in server.ends)
    assert isinstance(server.ends["a"], asyncio.CancelledError | ConnectionError)
    with asks(server, "/whole/20000000") as connection:
        await until(lambda: len(server.readers._answers) == 1)
        await until(lambda: not server.readers._answers)
        taken = 0
        with suppress(ConnectionError):
            while piece := await asyncio.to_thread(connection.recv, 2**20):
                taken += len(piece)
        assert taken < 20_000_000


@pytest.mark.parametrize("server", [(0.5, 2**30)], indirect=True)
async def test_who_takes_slowly_is_not(server: Server) -> None:
    """Fewer bytes than come meanwhile, so that what waits does not get less."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1_000)
    writer.write(b"GET /stream/a HTTP/1.1\r\nHost: x\r\n\r\n")
    taken = 0
    for _ in range(75):
        taken += len(await reader.read(100_000))
        await asyncio.sleep(0.02)
    assert taken and not server.ends
    writer.close()
    await until(lambda: "a" in server.ends)


@pytest.mark.parametrize("server", [(60, 30 * 2**20)], indirect=True)
async def test_when_memory_is_short_the_largest_goes_first(server: Server) -> None:
    with asks(server, "/stream/small?held=1000"), asks(server, "/stream/large?held=20000000"):
        await asyncio.sleep(0.3)
        assert not server.ends
        with asks(server, "/stream/middle?held=15000000"):
            await until(lambda: "large" in server.ends)
            await asyncio.sleep(0.2)
            assert set(server.ends) == {"large"}


@pytest.mark.parametrize("server", [(0.3, 2**30)], indirect=True)
async def test_a_connection_that_only_waits_is_left_alone(server: Server) -> None:
    with asks(server, "/whole/10") as connection:
        await until(lambda: len(server.readers._answers) == 1)
        await until(lambda: not server.readers._answers)
        await asyncio.sleep(0.4)
        connection.sendall(b"GET /whole/10 HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(connection.recv, 10_000)).count(b"x" * 10) == 2
