"""What NATS clients send about their jobs: checked, and turned into jobs and requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.msg import Msg

from baton.batch import names
from baton.batch.lines import MAX_LINE
from baton.batch.records import Job
from baton.batch.results import Item
from baton.batch.state import Jobs, cancel
from baton.bus.connection import BusDown
from baton.bus.stored import AWAY, StoreError, Work, WrongSequence, delivered, patiently, sequence
from baton.protocol.batch import Cancel, Close, Nudge, Open, Request
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton_services.batch.jobcache import JobCache

log = get_logger(__name__)

PULL = 64
WAIT_S = 5.0
OPEN_WAIT_S = 1.0  # how long a request that came before its job's `open` is put aside
OPEN_TRIES = 10

Asked = Open | Request | Close | Cancel
_json = msgspec.json.Decoder(Asked)
_packed = msgspec.msgpack.Decoder(Asked)


class Refused(Exception):
    """A message that is no use, and why."""


class Intake:
    """Takes clients' messages in turn. Each may come twice, and then changes nothing."""

    def __init__(self, host: ServiceHost, jobs: Jobs, keep_s: int) -> None:
        self._host = host
        self._jobs = jobs
        self._cache = JobCache(jobs)
        self._keep_s = keep_s
        self._queue = Work(host.bus, names.IN_STREAM, names.INTAKE)
        self._owners: set[str] = set()

    async def start(self, group: asyncio.TaskGroup) -> None:
        await self._queue.open()
        group.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                found = await self._queue.pull(PULL) or await self._queue.pull(1, wait_s=WAIT_S)
                await asyncio.gather(*(self._take(msg) for msg in found))
            except AWAY:
                await self._host.bus.up.wait()
                await asyncio.sleep(0.1)
            except StoreError as error:
                log.warning("a client's message has to wait: %s", error)
                await asyncio.sleep(WAIT_S)

    async def _take(self, msg: Msg) -> None:
        owner = msg.subject.rpartition(".")[2]
        if not names.check_owner(owner):
            log.warning("a message of an owner that cannot be one: %r", owner[:80])
            await patiently(lambda: self._queue.done(msg))
            return
        asked: Asked | None = None
        try:
            asked = _decode(msg.data)
            if not await self._apply(owner, asked, msg):
                await patiently(lambda: self._queue.again(msg, OPEN_WAIT_S))
                return
        except Refused as error:
            await self._refuse(owner, asked, sequence(msg), str(error))
        except (StoreError, *AWAY):
            raise
        except Exception:  # one message that we cannot deal with does not stop the others
            log.exception("message %d of %s", sequence(msg), owner)
            await self._refuse(
                owner, asked, sequence(msg), "a defect; the batch service's log has the reason"
            )
        await patiently(lambda: self._queue.done(msg))

    async def _apply(self, owner: str, asked: Asked, msg: Msg) -> bool:
        """Does what is asked. False: not yet, its job is not there."""
        if owner not in self._owners:
            await patiently(lambda: self._jobs.setup_owner(owner, self._keep_s))
            self._owners.add(owner)
        id = names.token(asked.job)
        match asked:
            case Open():
                await self._open(owner, id, asked, msg)
                await self._nudge()
                return True
            case Request():
                job = await patiently(lambda: self._cache.get(owner, id))
                if job is not None:
                    await self._add(job, asked, msg)
            case Close():
                seq, total = sequence(msg), asked.total
                job = await patiently(
                    lambda: self._jobs.change(owner, id, lambda job: _close(job, seq, total))
                )
            case Cancel():
                job = await patiently(lambda: self._jobs.change(owner, id, cancel))
        if job is None:
            if delivered(msg) >= OPEN_TRIES:
                raise Refused("there is no such job: send `open` first")
            self._cache.forget()
        elif not isinstance(asked, Request):
            await self._nudge()
        return job is not None

    async def _nudge(self) -> None:
        """Has keepers look at once; without it they would within a few seconds."""
        with contextlib.suppress(BusDown):
            await self._host.bus.publish(names.nudge(), Nudge())

    async def _change(self, owner: str, id: str, edit: Callable[[Job], bool]) -> Job | None:
        return await patiently(lambda: self._jobs.change(owner, id, edit))

    async def _open(self, owner: str, id: str, asked: Open, msg: Msg) -> None:
        now = int(time.time())
        wanted = Job(
            id=id,
            owner=owner,
            created_at=now,
            expires_at=now + asked.expires_s,
            in_progress_at=now,
            status="in_progress",
            priority=asked.priority,
            name=asked.job,
            packed=msg.data[:1] != b"{",
        )
        job = await patiently(lambda: self._jobs.create(wanted))
        await patiently(lambda: self._consumer(job))
        if job.over or job.priority != wanted.priority:
            raise Refused(f"there is a job of this name, {job.status}, priority {job.priority}: take another")

    async def _consumer(self, job: Job) -> None:
        """What a client that speaks JetStream takes its results from, with stops in between."""
        await self._jobs.streams.consumer(
            names.out_stream(job.owner),
            job.id,
            names.out(job.owner, job.id, "result", "*"),
            durable_name=job.id,
            ack_policy="explicit",
            inactive_threshold=self._keep_s * 10**9,
        )

    async def _add(self, job: Job, asked: Request, msg: Msg) -> None:
        if job.status != "in_progress":
            raise Refused(f"the job is {job.status}")
        if job.closed_at and sequence(msg) > job.closed_at:
            raise Refused("the job is closed")
        if not isinstance(asked.body.get("model"), str):
            raise Refused("body.model: is required")
        if asked.body.get("stream") or asked.body.get("background"):
            raise Refused("body.stream: a batch is not streamed")
        body = msgspec.json.encode(asked.body)
        if len(body) > MAX_LINE:
            raise Refused(f"the body is longer than {MAX_LINE >> 20} MB")
        item = Item(
            job=job.id,
            owner=job.owner,
            custom_id=asked.custom_id,
            endpoint=asked.endpoint,
            body=body,
            name=job.name,
            packed=job.packed,
        )
        subject = names.item(job.priority, job.owner, job.id, item.token)
        data = msgspec.msgpack.encode(item)
        try:
            await patiently(lambda: self._jobs.streams.publish(subject, data, expect=0))
        except WrongSequence:
            log.debug("request %s of job %s is there already", item.token, job.id)

    async def _refuse(self, owner: str, asked: Asked | None, seq: int, reason: str) -> None:
        """Tells the client, on the subject of what was no use."""
        told: dict[str, Any] = {"t": "rejected", "seq": seq, "reason": reason}
        if asked is not None:
            told["job"] = asked.job
            told["custom_id"] = asked.custom_id if isinstance(asked, Request) else None
        data = msgspec.json.encode(told)
        await patiently(lambda: self._jobs.setup_owner(owner, self._keep_s))
        await patiently(lambda: self._jobs.streams.publish(names.rejected(owner), data))


def _decode(data: bytes) -> Asked:
    try:
        asked: Asked = (_json if data[:1] == b"{" else _packed).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"no message of a client: {str(error)[:300] or 'it nests too deep'}") from error
    return asked


def _close(job: Job, seq: int, total: int | None) -> bool:
    if job.status != "in_progress" or job.closed_at:
        return False
    job.closed_at = seq
    if total is not None:
        job.total = total
    return True
