"""`/v1/batches`: a batch is a job in the key-value bucket; batch services do the rest."""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from baton.batch import names
from baton.batch.files import Files
from baton.batch.records import Job, shown_job
from baton.batch.state import Jobs, cancel
from baton.bus.connection import Bus
from baton.bus.directory import Directory
from baton.bus.stored import patiently
from baton.protocol.batch import MAX_EXPIRY_S, Endpoint, Nudge, Priority
from baton.protocol.liveness import Role
from baton_services.gateway.batch.paging import limit, listed, page
from baton_services.gateway.body import read_json
from baton_services.gateway.errors import invalid, refused
from baton_services.gateway.keys import caller
from baton_services.gateway.parse import parse

DEFAULT_LIMIT, MOST = 20, 100
PATIENCE_S = 3.0
_window = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]


class ExpiresAfter(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3_600, le=2_592_000)]


class CreateBatch(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/batches`; `priority` is an extension."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(max_length=16)]
    metadata: Annotated[_Metadata, Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    priority: Priority | None = None


class BatchHandlers:
    def __init__(self, bus: Bus, directory: Directory, jobs: Jobs, files: Files) -> None:
        self._bus = bus
        self._directory = directory
        self._jobs = jobs
        self._files = files

    async def create(self, http: web.Request) -> web.Response:
        asked = parse(await read_json(http), CreateBatch)
        key = caller(http)
        owner = names.owner_token(key.owner)
        await self._check_file(owner, asked.input_file_id)
        if not self._directory.live(Role.BATCH):
            words = "no batch service is running: start one (`baton serve batch`), or try again later"
            raise refused("no_batch_service", words, headers={"Retry-After": "1"})
        now = int(time.time())
        after = asked.output_expires_after
        job = Job(
            id=names.new_id("batch_"),
            owner=owner,
            created_at=now,
            expires_at=now + _seconds(asked.completion_window),
            priority=asked.priority or "low",
            endpoint=asked.endpoint,
            models=None if key.models is None else sorted(key.models),
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            output_expires_s=after.seconds if after is not None else 0,
            metadata=asked.metadata,
        )
        job = await patiently(lambda: self._jobs.create(job), for_s=PATIENCE_S)
        await self._bus.publish(names.nudge(), Nudge())
        return _json(shown_job(job))

    async def get(self, http: web.Request) -> web.Response:
        return await self._shown(await self._job(http))

    async def list(self, http: web.Request) -> web.Response:
        size = limit(http, DEFAULT_LIMIT, MOST)
        found = [job for job in await self._jobs.of(names.owner_token(caller(http).owner)) if not job.name]
        shown, more = page(http, found, size)
        for job in shown:
            job.counts = await self._jobs.counts(job)
        return _json(listed([shown_job(job) for job in shown], more))

    async def cancel(self, http: web.Request) -> web.Response:
        job = await self._job(http)
        changed = await patiently(lambda: self._jobs.change(job.owner, job.id, cancel), for_s=PATIENCE_S)
        if changed is None or changed.status not in ("cancelling", "cancelled"):
            status = changed.status if changed is not None else "gone"
            raise refused("conflict", f"a batch that is {status} cannot be cancelled", param="batch_id")
        await self._bus.publish(names.nudge(), Nudge())
        return await self._shown(changed)

    async def _shown(self, job: Job) -> web.Response:
        job.counts = await self._jobs.counts(job)
        return _json(shown_job(job))

    async def _job(self, http: web.Request) -> Job:
        id = http.match_info["batch"]
        owner = names.owner_token(caller(http).owner)
        found = await self._jobs.get(owner, id) if names.check_id(id) else None
        if found is None or found[0].name:
            raise refused("not_found", f"there is no batch {id[:80]!r}", param="batch_id")
        return found[0]

    async def _check_file(self, owner: str, id: str) -> None:
        file = await self._files.get(owner, id) if names.check_id(id) else None
        if file is None:
            raise invalid(f"input_file_id: there is no file {id[:80]!r}", "input_file_id")
        if file.purpose != "batch":
            raise invalid(f"input_file_id: its purpose is {file.purpose!r}, not 'batch'", "input_file_id")


def _seconds(window: str) -> int:
    found = _window.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_EXPIRY_S:
        words = "completion_window: is '24h', or another number of s, m, h or d up to 30d"
        raise invalid(words, "completion_window")
    return seconds


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
