"""The server stops, freezes, restarts, or is not what it should be."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from baton.bus.connection import Bus, BusDown, BusRefused, NoResponder
from baton.bus.jetstream import require_jetstream
from baton.bus.server import EmbeddedServer
from baton.config.settings import BusSettings
from baton.protocol.codec import Codec
from baton.protocol.kvevents import KvEvents
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Cancel, TokenBatch

ANSWER = Codec(Accepted, Rejected)
CANCEL = Cancel(request="r", attempt=0)
PASSWORD = "s3cret-p4ss"
SUBJECT = "test.faults"

Open = Callable[[str], Awaitable[Bus]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of this test's own."""
    server = EmbeddedServer()
    server.start(tmp_path / "nats", user="u", password=PASSWORD)
    yield server
    server.stop()


@pytest.fixture
async def open_bus(server: EmbeddedServer) -> AsyncIterator[Open]:
    opened: list[Bus] = []

    async def open_one(name: str) -> Bus:
        settings = BusSettings(url=server.url, user="u", password=PASSWORD)
        opened.append(await Bus.connect(settings, name=name, wait_s=5))
        return opened[-1]

    yield open_one
    for bus in opened:
        await bus.close()


async def down(bus: Bus) -> None:
    async with asyncio.timeout(5):
        while bus.up.is_set():
            await asyncio.sleep(0.005)


async def serve(bus: Bus, subject: str = SUBJECT) -> asyncio.Task[None]:
    inbox = await bus.inbox(subject, Cancel)

    async def answer() -> None:
        async for delivery in inbox:
            await delivery.respond(Accepted())

    return asyncio.create_task(answer())


async def test_a_lost_server_fails_every_pending_call_at_once(server: EmbeddedServer, open_bus: Open) -> None:
    caller, worker = await open_bus("caller"), await open_bus("worker")
    inbox = await worker.inbox(SUBJECT, Cancel)
    changes: list[bool] = []
    caller.on_change(changes.append)
    calls = [asyncio.create_task(caller.call(SUBJECT, CANCEL, ANSWER, timeout_s=60)) for _ in range(50)]
    for _ in calls:
        await asyncio.wait_for(inbox.get(), 5)
    started = time.monotonic()
    server.stop()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - started < 5
    assert {type(outcome) for outcome in outcomes} == {BusDown}
    assert changes == [False]
    assert caller.down_since is not None


async def test_nothing_is_buffered_while_the_server_is_away(server: EmbeddedServer, open_bus: Open) -> None:
    sender, worker = await open_bus("sender"), await open_bus("worker")
    inbox = await worker.inbox(SUBJECT, Cancel)
    server.stop()
    await down(sender)
    for use in (sender.publish(SUBJECT, CANCEL), sender.call(SUBJECT, CANCEL, ANSWER, timeout_s=60)):
        with pytest.raises(BusDown, match=r"127\.0\.0\.1"):
            await use
    server.restart()
    await asyncio.wait_for(sender.up.wait(), 5)
    await asyncio.wait_for(worker.up.wait(), 5)
    await sender.publish(SUBJECT, Cancel(request="after", attempt=0))
    assert (await asyncio.wait_for(inbox.get(), 5)).message.request == "after"


async def test_a_reply_to_a_caller_that_is_cut_off_only_counts(
    server: EmbeddedServer, open_bus: Open
) -> None:
    caller, worker = await open_bus("caller"), await open_bus("worker")
    inbox = await worker.inbox(SUBJECT, Cancel)
    call = asyncio.create_task(caller.call(SUBJECT, CANCEL, ANSWER, timeout_s=60))
    delivery = await asyncio.wait_for(inbox.get(), 5)
    server.stop()
    with pytest.raises(BusDown):
        await call
    await down(worker)
    await delivery.respond(Accepted())
    assert worker.replies_lost == 1


async def test_after_a_second_away_service_goes_on(server: EmbeddedServer, open_bus: Open) -> None:
    caller, worker = await open_bus("caller"), await open_bus("worker")
    serving = await serve(worker)
    changes: list[bool] = []
    caller.on_change(changes.append)
    server.stop()
    await down(caller)
    late = await asyncio.wait_for(worker.inbox("test.late", Cancel), 5)  # made while the server is away
    await asyncio.sleep(1)
    server.restart()
    await asyncio.wait_for(caller.up.wait(), 5)
    assert changes == [False, True]
    assert caller.down_since is None
    assert await caller.call(SUBJECT, CANCEL, ANSWER, timeout_s=5) == Accepted()
    await asyncio.wait_for(worker.up.wait(), 5)
    await caller.publish("test.late", CANCEL)
    await caller.publish("test.late", Cancel(request="second", attempt=0))
    received = [(await asyncio.wait_for(late.get(), 5)).message.request for _ in range(2)]
    assert received == ["r", "second"]  # subscribed once, although asked for twice over
    serving.cancel()


async def test_a_503_is_not_believed_while_others_are_on_their_way_back(
    server: EmbeddedServer, open_bus: Open
) -> None:
    """Whoever is back first would otherwise take everybody else for dead."""
    first = await open_bus("first")
    lost: list[bool] = []
    reply = first.watch(SUBJECT, lambda: lost.append(True))
    server.stop()
    await down(first)
    server.restart()
    await asyncio.wait_for(first.up.wait(), 5)
    call = asyncio.create_task(first.call(SUBJECT, CANCEL, ANSWER, timeout_s=5))
    await first.publish(SUBJECT, TokenBatch(worker="w", epoch=1, items=[]), reply=reply)
    await asyncio.sleep(0.2)
    second = await open_bus("second")
    serving = await serve(second)
    assert await call == Accepted()
    assert lost == []
    serving.cancel()
    with pytest.raises(NoResponder):  # but not for ever
        await first.call("test.nobody", CANCEL, ANSWER, timeout_s=30)
    await first.publish("test.nobody", CANCEL, reply=first.watch("test.nobody", lambda: lost.append(True)))
    with pytest.raises(NoResponder):
        await first.call("test.nobody", CANCEL, ANSWER, timeout_s=30)
    assert lost == [True]


async def test_a_frozen_server_is_noticed_and_left(server: EmbeddedServer, open_bus: Open) -> None:
    """It holds the socket open and reads nothing; what waits to be sent stays bounded."""
    sender, other = await open_bus("sender"), await open_bus("other")
    inbox = await other.inbox(SUBJECT, Cancel)
    bulk = await other.inbox("test.bulk", KvEvents)
    pid = server.pid
    assert pid is not None
    megabyte = KvEvents(worker="w", epoch=1, number=1, stored=bytes(1 << 20))
    sent = 0
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # until then it may still answer
        await asyncio.sleep(0.01)
    try:
        pending = asyncio.create_task(sender.call("test.frozen", CANCEL, ANSWER, timeout_s=60))
        await asyncio.sleep(0.1)  # it is sent
        with pytest.raises(BusDown):
            async with asyncio.timeout(20):
                while True:
                    await sender.publish("test.bulk", megabyte)
                    sent += 1
        with pytest.raises(BusDown):
            await asyncio.wait_for(pending, 20)
        assert sender._client.pending_data_size < 40 << 20
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(sender.up.wait(), 10)
    await asyncio.wait_for(other.up.wait(), 10)
    await sender.publish("test.bulk", megabyte)
    await sender.publish(SUBJECT, CANCEL)
    assert (await asyncio.wait_for(inbox.get(), 5)).message == CANCEL
    assert sent > 40
    assert len(bulk) < 20  # what the kernel held; the rest could not be sent then and is not sent now


def test_all_of_it_holds_on_uvloop(server: EmbeddedServer) -> None:
    """The loop that services run on: another implementation of the socket below."""

    async def scenario() -> None:
        settings = BusSettings(url=server.url, user="u", password=PASSWORD)
        caller = await Bus.connect(settings, name="caller", wait_s=5)
        worker = await Bus.connect(settings, name="worker", wait_s=5)
        serving = await serve(worker)
        silent = await worker.inbox("test.silent", Cancel)
        assert await caller.call(SUBJECT, CANCEL, ANSWER, timeout_s=5) == Accepted()
        pending = asyncio.create_task(caller.call("test.silent", CANCEL, ANSWER, timeout_s=60))
        await asyncio.wait_for(silent.get(), 5)
        server.stop()
        with pytest.raises(BusDown):
            await asyncio.wait_for(pending, 5)
        server.restart()
        await asyncio.wait_for(caller.up.wait(), 5)
        assert await caller.call(SUBJECT, CANCEL, ANSWER, timeout_s=5) == Accepted()
        serving.cancel()
        await caller.close()
        await worker.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_a_server_that_refuses_us_on_its_return_is_tried_for_ever(
    server: EmbeddedServer, open_bus: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await open_bus("bus")
    port = int(server.url.rpartition(":")[2])
    server.stop()
    await down(bus)
    other = EmbeddedServer()
    other.start(tmp_path / "other", port=port, user="u", password="another")
    async with asyncio.timeout(5):
        while "Authorization" not in caplog.text:
            await asyncio.sleep(0.02)
    other.stop()
    server.restart()
    await asyncio.wait_for(bus.up.wait(), 5)
    assert PASSWORD not in caplog.text


async def test_a_server_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    server = EmbeddedServer()
    server.start(tmp_path, user="u", password=PASSWORD)
    server.stop()
    settings = BusSettings(url=server.url, user="u", password=PASSWORD)
    connecting = asyncio.create_task(Bus.connect(settings, name="early", wait_s=20))
    await asyncio.sleep(0.3)
    server.restart()
    bus = await connecting
    assert bus.up.is_set()
    await bus.close()
    server.stop()


async def test_no_server_is_one_clear_line(tmp_path: Path) -> None:
    settings = BusSettings(url=f"nats://u:{PASSWORD}@127.0.0.1:9", user="u", password=PASSWORD)
    with pytest.raises(BusDown) as caught:
        await Bus.connect(settings, name="lonely", wait_s=0.3)
    words = str(caught.value)
    assert "nats://127.0.0.1:9" in words
    assert "connection refused" in words
    assert "bus.url" in words
    assert "\n" not in words
    assert PASSWORD not in words


async def test_a_url_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(BusRefused, match=r"bus\.url"):
        await Bus.connect(BusSettings(url="nats://"), name="nowhere", wait_s=30)


@pytest.mark.parametrize(("user", "password"), [("u", "wrong-pass"), ("", ""), ("v", PASSWORD)])
async def test_wrong_credentials_are_one_clear_line_at_once(
    server: EmbeddedServer, user: str, password: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = BusSettings(url=server.url, user=user, password=password)
    started = time.monotonic()
    with caplog.at_level(logging.DEBUG), pytest.raises(BusRefused) as caught:
        await Bus.connect(settings, name="stranger", wait_s=60)
    assert time.monotonic() - started < 10
    words = str(caught.value)
    assert "BATON_BUS_PASSWORD" in words
    assert "\n" not in words
    assert not password or password not in words + caplog.text


async def test_no_repr_shows_the_password(open_bus: Open) -> None:
    bus = await open_bus("bus")
    inbox = await bus.inbox(SUBJECT, Cancel)
    await bus.publish(SUBJECT, CANCEL)
    delivery = await asyncio.wait_for(inbox.get(), 5)
    assert PASSWORD not in f"{bus!r} {inbox!r} {delivery!r}"
    assert repr(bus).endswith("up)")


async def test_a_server_with_a_small_max_payload_is_refused(tmp_path: Path) -> None:
    server = EmbeddedServer()
    server.start(tmp_path, user="u", password=PASSWORD)
    server.stop()
    config = tmp_path / "nats.conf"
    config.write_text(config.read_text().replace("max_payload: 8MB", "max_payload: 1MB"))
    server.restart()
    with pytest.raises(BusRefused, match="max_payload: 8MB"):
        await Bus.connect(BusSettings(url=server.url, user="u", password=PASSWORD), name="big", wait_s=30)
    server.stop()


async def test_jetstream_is_checked_for(tmp_path: Path, bus: Bus) -> None:
    await require_jetstream(bus)
    server = EmbeddedServer()
    server.start(tmp_path, user="u", password=PASSWORD, jetstream=False)
    without = await Bus.connect(
        BusSettings(url=server.url, user="u", password=PASSWORD), name="plain", wait_s=5
    )
    with pytest.raises(BusRefused, match="-js"):
        await require_jetstream(without)
    await without.close()
    server.stop()


async def test_a_closed_bus_says_so_and_closes_again(open_bus: Open, server: EmbeddedServer) -> None:
    bus, other = await open_bus("bus"), await open_bus("other")
    await bus.close()
    await bus.close()
    with pytest.raises(BusDown):
        await bus.publish(SUBJECT, CANCEL)
    with pytest.raises(BusDown):
        await bus.inbox(SUBJECT, Cancel)
    server.stop()
    await down(other)
    await asyncio.wait_for(other.close(), 10)
