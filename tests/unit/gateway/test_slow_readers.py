"""A client that takes nothing: it is cut off after a while, and waits alone."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton_services.gateway import generate
from baton_services.gateway.web_app import REQUEST_ID

MEGABYTE = b"x" * 2**20


class Server:
    """Streams for ever; notes how each stream ended."""

    def __init__(self) -> None:
        self.ends: list[BaseException] = []

    async def stream(self, http: web.Request) -> web.StreamResponse:
        http[REQUEST_ID] = "r"
        response = web.StreamResponse()
        await response.prepare(http)
        try:
            while True:
                await generate._write(http, response, MEGABYTE)
        except BaseException as error:
            self.ends.append(error)
            raise


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, TestServer]]:
    subject, app = Server(), web.Application()
    app.router.add_get("/", subject.stream)
    async with TestServer(app, handler_cancellation=True) as running:
        yield subject, running


async def test_a_client_that_takes_nothing_is_cut_off(
    server: tuple[Server, TestServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "STALLED_S", 0.2)
    subject, running = server
    assert running.port is not None
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        began = time.monotonic()
        while not subject.ends:
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.02)
    assert isinstance(subject.ends[0], ConnectionResetError)


async def test_one_that_takes_slowly_is_not(
    server: tuple[Server, TestServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "STALLED_S", 0.5)
    subject, running = server
    assert running.port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    began, taken = time.monotonic(), 0
    while time.monotonic() - began < 1.5:
        taken += len(await reader.read(2**20))
        await asyncio.sleep(0.005)
    assert taken > 2**20 and not subject.ends
    writer.close()
    while not subject.ends:
        await asyncio.sleep(0.02)
    assert isinstance(subject.ends[0], asyncio.CancelledError | ConnectionError)
