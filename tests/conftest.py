"""What the tests of all parts share: a real NATS server, and connections to it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from baton.bus.connection import Bus
from baton.bus.server import EmbeddedServer
from baton.config.settings import BusSettings

# Torch's threads would spin while they wait, and take the cores from the processes under test.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

USER, PASSWORD = "tests", "not-a-secret"

Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusSettings]:
    """A real nats-server with JetStream for the whole session. Tests share it: take subjects of your own."""
    server = EmbeddedServer()
    url = server.start(tmp_path_factory.mktemp("nats"), user=USER, password=PASSWORD)
    yield BusSettings(url=url, user=USER, password=PASSWORD)
    server.stop()


@pytest.fixture
async def connect(nats_server: BusSettings) -> AsyncIterator[Connect]:
    """`await connect(name)` gives a connection to the session's server; closed after the test."""
    opened: list[Bus] = []

    async def open_bus(name: str) -> Bus:
        opened.append(await Bus.connect(nats_server, name=name, wait_s=10))
        return opened[-1]

    yield open_bus
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    """One connection."""
    return await connect("test")


@pytest.fixture
async def bus_pair(connect: Connect) -> tuple[Bus, Bus]:
    """Two connections, as two processes would have them."""
    return await connect("test-a"), await connect("test-b")
