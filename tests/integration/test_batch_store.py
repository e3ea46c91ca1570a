"""What batches keep in JetStream, on a real server: streams, files, jobs, and results stored once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from baton.batch import files, names, results
from baton.batch.files import Files, TooLarge
from baton.batch.records import File, Job
from baton.batch.results import Item
from baton.batch.state import Jobs, cancel
from baton.bus.connection import Bus, BusDown
from baton.bus.server import EmbeddedServer
from baton.bus.stored import StoreError, Streams, Work, WrongSequence, delivered, patiently, sequence
from baton.config.settings import BusSettings
from baton_services.batch.outlet import Outlet


async def content(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def file(owner: str, **more: object) -> File:
    fields = {"filename": "f.jsonl", "purpose": "batch", "bytes": 0, "created_at": 1, "part": ""}
    return File(id=names.new_id("file-"), owner=owner, **{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
async def store(bus: Bus) -> Files:
    made = Files(bus)
    await made.setup()
    await Jobs(bus).setup()
    return made


async def test_a_stream_is_read_counted_and_purged(bus: Bus) -> None:
    streams = Streams(bus)
    await streams.ensure("batch-store-1", subjects=["batch-store-1.>"])
    await streams.ensure("batch-store-1", subjects=["batch-store-1.>"], max_age=10**12)
    for number in range(600):
        await streams.publish(f"batch-store-1.{number % 300}.x", b"%d" % number)
    with pytest.raises(WrongSequence):
        await streams.publish("batch-store-1.7.x", b"", expect=0)
    last = await streams.last("batch-store-1", "batch-store-1.7.x")
    assert last is not None and last.data == b"307"
    assert await streams.publish("batch-store-1.7.x", b"new", expect=last.seq) == 601
    assert await streams.last("batch-store-1", "batch-store-1.none.x") is None
    got = [
        int(one.data)
        async for one in streams.scan("batch-store-1", "batch-store-1.*.x")
        if one.data != b"new"
    ]
    assert got == list(range(600))
    assert len(await streams.page("batch-store-1", "batch-store-1.*.x", after=10, limit=5)) == 5
    assert await streams.count("batch-store-1", "batch-store-1.>") == 601
    assert len(await streams.subjects("batch-store-1", "batch-store-1.*.x")) == 300
    await streams.purge("batch-store-1", "batch-store-1.7.*")
    assert await streams.count("batch-store-1", "batch-store-1.>") == 598
    with pytest.raises(StoreError):
        await streams.consumer_info("batch-store-1", "none")


async def test_work_is_handed_out_acknowledged_and_handed_out_again(bus: Bus) -> None:
    streams = Streams(bus)
    await streams.ensure("batch-store-2", subjects=["batch-store-2.>"])
    config = {"ack_policy": "explicit", "ack_wait": 10**9, "durable_name": "w"}
    await streams.consumer("batch-store-2", "w", "batch-store-2.>", **config)
    work = Work(bus, "batch-store-2", "w")
    await work.open()
    assert await work.pull(10) == []
    waiting = asyncio.create_task(work.pull(1, wait_s=5.0))
    await asyncio.sleep(0.1)
    for number in range(30):
        await streams.publish(f"batch-store-2.{number}", b"x")
    [first] = await waiting
    rest = await work.pull(100)
    assert [sequence(one) for one in [first, *rest]] == list(range(1, 31))
    for one in rest:
        await work.done(one)
    await work.again(first, 0.0)
    [again] = await work.pull(1, wait_s=2.0)
    assert (sequence(again), delivered(again)) == (1, 2)
    await asyncio.sleep(0.6)
    await work.going_on(again)
    await asyncio.sleep(0.6)
    assert await work.pull(10) == []  # it was said to be going on
    [late] = await work.pull(1, wait_s=2.0)
    assert delivered(late) == 3
    await work.done(late)
    info = await streams.consumer_info("batch-store-2", "w")
    assert info["ack_floor"]["stream_seq"] == 30


async def test_a_file_is_what_was_sent(store: Files) -> None:
    data = os.urandom(files.CHUNK * 3 + 17)
    pieces = [data[at : at + 100_000] for at in range(0, len(data), 100_000)]
    before = await store.size()
    written = await store.write(file("own1"), content(*pieces), max_bytes=len(data))
    assert await store.size() - before > len(data)
    assert written.bytes == len(data)
    found = await store.get("own1", written.id)
    assert found == written
    assert b"".join([part async for part in store.read(written)]) == data
    assert await store.get("own2", written.id) is None
    assert [one.id for one in await store.of("own1")] == [written.id]
    await store.delete(written)
    assert await store.get("own1", written.id) is None
    with pytest.raises(StoreError):
        _ = [part async for part in store.read(written)]


async def test_an_upload_that_ends_early_leaves_nothing(store: Files, bus: Bus) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield b"x" * files.CHUNK * 2
        raise ConnectionResetError

    async def hangs() -> AsyncIterator[bytes]:
        yield b"x" * files.CHUNK * 2
        await asyncio.sleep(60)

    streams = Streams(bus)
    before = set(await streams.subjects(names.FILE_STREAM, "$O.baton-files.>"))
    with pytest.raises(ConnectionResetError):
        await store.write(file("own3"), breaks(), max_bytes=2**30)
    with pytest.raises(TooLarge):
        await store.write(file("own3"), content(b"x" * 2_000_000), max_bytes=1_999_999)
    task = asyncio.create_task(store.write(file("own3"), hangs(), max_bytes=2**30))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.wait({task})
    assert set(await streams.subjects(names.FILE_STREAM, "$O.baton-files.>")) == before
    assert await store.of("own3") == []


async def test_the_sweeper_finds_what_a_killed_upload_left(store: Files, bus: Bus) -> None:
    kept = await store.write(file("own4"), content(b"kept"), max_bytes=10)
    old = await store.write(file("own4", expires_at=2), content(b"old"), max_bytes=10)
    streams = Streams(bus)
    await streams.publish(names.chunk("ab" * 16), b"left over")
    assert await store.get("own4", old.id) is None
    await store.sweep()  # too young to be told from an upload that goes on
    assert await streams.last(names.FILE_STREAM, names.chunk("ab" * 16)) is not None
    await asyncio.sleep(0.05)
    assert await store.sweep(0.01) >= 1
    for part, there in (("ab" * 16, False), (old.part, False), (kept.part, True)):
        assert (await streams.last(names.FILE_STREAM, names.chunk(part)) is not None) is there


async def test_jobs_change_by_compare_and_set(bus: Bus, store: Files) -> None:
    jobs = Jobs(bus)
    job = Job(id=names.new_id("batch_"), owner="own5", created_at=1, expires_at=2)
    assert await jobs.create(job) == job
    again = await jobs.create(msgspec.structs.replace(job, created_at=9))
    assert again.created_at == 1
    assert ("own5", job.id) in await jobs.active()

    def count(job: Job) -> bool:
        job.total += 1
        return True

    await asyncio.gather(*(jobs.change("own5", job.id, count) for _ in range(5)))
    found = await jobs.get("own5", job.id)
    assert found is not None and found[0].total == 4
    with pytest.raises(WrongSequence):
        await jobs.save(job, found[1] - 1)
    cancelled = await jobs.change("own5", job.id, cancel)
    assert cancelled is not None and cancelled.status == "cancelling"
    assert await jobs.change("own5", "batch_" + "0" * 32, cancel) is None
    assert [one.id for one in await jobs.of("own5")] == [job.id]
    await jobs.remove("own5", job.id)
    assert await jobs.of("own5") == []


async def test_a_result_is_stored_once_whoever_comes_second(bus_pair: tuple[Bus, Bus], store: Files) -> None:
    outlets = [Outlet(Jobs(bus)) for bus in bus_pair]
    await Jobs(bus_pair[0]).setup_owner("own6", 3_600)
    item = Item(job="a" * 32, owner="own6", custom_id="x", endpoint="/v1/x", body=b"{}")
    made = [results.answered(item, 400, str(number), b"{}") for number in range(20)]
    first = await asyncio.gather(*(outlets[n % 2].store(item, result) for n, result in enumerate(made)))
    assert first.count(True) == 1
    streams = Jobs(bus_pair[0]).streams
    for kind in ("result", "failed"):
        subject = names.out("own6", item.job, kind, "*")
        [stored] = [one async for one in streams.scan(names.out_stream("own6"), subject)]
        assert msgspec.json.decode(stored.data)["response"]["request_id"] == str(first.index(True))
    assert await outlets[1].settled(item)
    # Whoever wrote a failed result may have died before it wrote it among the failures.
    await streams.purge(names.out_stream("own6"), names.out("own6", item.job, "failed", "*"))
    assert not await outlets[0].store(item, made[3])
    assert await streams.count(names.out_stream("own6"), names.out("own6", item.job, "failed", "*")) == 1


async def test_calls_wait_for_a_server_that_is_killed_and_nothing_stored_is_lost(tmp_path: Path) -> None:
    server = EmbeddedServer()
    url = server.start(tmp_path / "nats", user="u", password="p")
    bus = await Bus.connect(BusSettings(url=url, user="u", password="p"), name="killed")
    try:
        streams = Streams(bus)
        await streams.ensure("s", subjects=["s.>"])
        done = 0

        async def write() -> None:
            nonlocal done
            for number in range(300):

                async def put(number: int = number) -> None:
                    try:
                        await streams.publish(f"s.{number}", b"x", expect=0)
                    except WrongSequence:
                        return  # it was stored, only the answer was lost

                await patiently(put)
                done += 1

        writing = asyncio.create_task(write())
        for _ in range(2):
            before = done
            while done < before + 20:
                await asyncio.sleep(0.01)
            assert server.pid is not None
            os.kill(server.pid, 9)
            with pytest.raises(BusDown):
                while True:
                    await streams.count("s", "s.>")
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.restart)
        await asyncio.wait_for(writing, 30)
        assert len(await patiently(lambda: streams.subjects("s", "s.>"))) == 300
    finally:
        await bus.close()
        server.stop()
