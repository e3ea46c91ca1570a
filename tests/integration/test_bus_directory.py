"""A directory follows real heartbeats: who joins, changes, falls silent, is left out, is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from baton.bus.connection import Bus, BusDown
from baton.bus.directory import Directory
from baton.bus.server import EmbeddedServer
from baton.config.settings import BusSettings
from baton.protocol import subjects
from baton.protocol.liveness import Ask, Heartbeat, Role, State

MODEL = "a model"

Connect = Callable[[str], Awaitable[Bus]]


class Process:
    """Something that sends heartbeats, and answers `Ask`."""

    def __init__(self, bus: Bus, instance: str, *, model: str = MODEL, epoch: int = 1) -> None:
        self.bus = bus
        self.beat = Heartbeat(
            role=Role.DECODE,
            id=instance,
            epoch=epoch,
            model=model,
            state=State.READY,
            interval_ms=60_000,
            seq=0,
        )

    async def announce(self, **fields: object) -> None:
        self.beat.seq += 1
        for name, value in fields.items():
            setattr(self.beat, name, value)
        await self.bus.publish(subjects.heartbeat(self.beat.model, self.beat.role, self.beat.id), self.beat)

    async def answer_asks(self) -> None:
        async for _ in await self.bus.inbox(subjects.ask(), Ask):
            await self.announce()


@pytest.fixture
async def others(connect: Connect) -> Bus:
    """The connection of the processes that are followed."""
    return await connect("others")


@pytest.fixture
async def directory(bus: Bus) -> AsyncIterator[Directory]:
    directory = Directory(bus, model=MODEL)
    running = asyncio.create_task(directory.run())
    probe = Process(bus, "probe")
    async with asyncio.timeout(10):
        while directory.get("probe") is None:
            await probe.announce()
            await asyncio.sleep(0.01)
    await probe.announce(state=State.STOPPED)
    assert await directory.wait_for(lambda known: known.get("probe") is None, 5)
    yield directory
    running.cancel()


def ids(directory: Directory) -> list[str]:
    return [beat.id for beat in directory.live(Role.DECODE)]


async def test_a_new_directory_asks_and_hears_everybody_at_once(connect: Connect) -> None:
    others, mine = await connect("others"), await connect("mine")
    processes = [Process(others, name) for name in ("ask-1", "ask-2")]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.answer_asks()) for one in processes]
        async with asyncio.timeout(5):
            while len(others.inboxes) < 2:
                await asyncio.sleep(0.01)
        directory = Directory(mine, model=MODEL)
        tasks.append(group.create_task(directory.run()))
        # their interval is a minute: without the question nothing would come
        assert await directory.wait_for(lambda known: {"ask-1", "ask-2"} <= set(ids(known)), 5)
        for task in tasks:
            task.cancel()


async def test_changes_are_told(directory: Directory, others: Bus) -> None:
    told: list[tuple[str, int, str]] = []
    directory.subscribe(lambda beat, kind: told.append((beat.id, beat.epoch, kind)))
    process = Process(others, "w1")
    await process.announce()
    await process.announce(note="busy")
    successor = Process(others, "w1", epoch=2)
    await successor.announce()
    await process.announce()  # the old one still twitches
    await successor.announce(state=State.STOPPED)
    assert await directory.wait_for(lambda known: len(told) >= 5, 5)
    assert told == [
        ("w1", 1, "joined"),
        ("w1", 1, "updated"),
        ("w1", 1, "left"),
        ("w1", 2, "joined"),
        ("w1", 2, "left"),
    ]


async def test_silence_is_told_without_being_asked(directory: Directory, others: Bus) -> None:
    left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    directory.subscribe(lambda beat, kind: left.set_result(beat.id) if kind == "left" else None)
    process = Process(others, "w1")
    await process.announce(interval_ms=50)
    assert await directory.wait_for(lambda known: ids(known) == ["w1"], 5)
    assert await asyncio.wait_for(left, 5) == "w1"
    assert ids(directory) == []


async def test_an_excluded_worker_returns_with_its_second_heartbeat(
    directory: Directory, others: Bus
) -> None:
    process = Process(others, "w1")
    await process.announce()
    assert await directory.wait_for(lambda known: ids(known) == ["w1"], 5)
    directory.exclude("w1", 1)
    assert ids(directory) == []
    await process.announce()
    assert await directory.wait_for(lambda known: _seq(known, "w1") == 2, 5)
    assert ids(directory) == []
    await process.announce()
    assert await directory.wait_for(lambda known: ids(known) == ["w1"], 5)


def _seq(directory: Directory, instance: str) -> int:
    beat = directory.get(instance)
    return beat.seq if beat is not None else -1


async def test_it_hears_its_model_and_services_of_every_model(directory: Directory, others: Bus) -> None:
    for instance, model in (("other", "another model"), ("any", ""), ("own", MODEL)):
        await Process(others, instance, model=model).announce()
    assert await directory.wait_for(lambda known: len(ids(known)) >= 2, 5)
    assert sorted(ids(directory)) == ["any", "own"]


async def test_a_heartbeat_in_anothers_name_is_ignored(directory: Directory, others: Bus) -> None:
    forged = Process(others, "forged").beat
    await others.publish(subjects.heartbeat(MODEL, Role.DECODE, "forger"), forged)
    await Process(others, "honest").announce()
    assert await directory.wait_for(lambda known: ids(known) == ["honest"], 5)
    assert directory.ignored == 1


async def test_waiting_ends_when_the_time_is_up(directory: Directory) -> None:
    assert not await directory.wait_for(lambda known: False, 0.05)


async def test_nobody_dies_of_our_own_silence(tmp_path: Path) -> None:
    """While the server is away no heartbeat can arrive; that says nothing about the others."""
    server = EmbeddedServer()
    url = server.start(tmp_path, user="u", password="p")
    settings = BusSettings(url=url, user="u", password="p")
    mine = await Bus.connect(settings, name="mine", wait_s=5)
    others = await Bus.connect(settings, name="others", wait_s=5)
    directory = Directory(mine, model=MODEL)
    running = asyncio.create_task(directory.run())
    left: list[str] = []
    directory.subscribe(lambda beat, kind: left.append(beat.id) if kind == "left" else None)
    process = Process(others, "w1")

    async def beat_always() -> None:
        while True:
            with contextlib.suppress(BusDown):
                await process.announce(interval_ms=500)
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat_always())
    assert await directory.wait_for(lambda known: ids(known) == ["w1"], 5)
    server.stop()
    await asyncio.sleep(1.7)
    assert ids(directory) == ["w1"]
    server.restart()
    seen = process.beat.seq
    assert await directory.wait_for(lambda known: _seq(known, "w1") > seen, 5)
    assert left == []
    for task in (running, beating):
        task.cancel()
    await mine.close()
    await others.close()
    server.stop()
