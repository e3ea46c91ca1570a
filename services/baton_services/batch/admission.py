"""From a batch's input file to requests that run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from baton.batch.files import Files
from baton.batch.records import Counts, Job, Status
from baton.batch.state import Jobs
from baton.protocol.liveness import Role
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton_services.batch import loading

log = get_logger(__name__)

WAIT_S = 1.0  # for a model to be served, before it is known whether the right one is meant

Edit = Callable[[Job], bool]


class Admission:
    """Checks a job's input, then puts its requests into the queue. Each step may be done twice."""

    def __init__(
        self, host: ServiceHost, jobs: Jobs, files: Files, change: Callable[[Job, Edit], Awaitable[Job]]
    ) -> None:
        self._host = host
        self._jobs = jobs
        self._files = files
        self._change = change

    def _served(self) -> frozenset[str]:
        beats = self._host.directory.live(Role.TOKENIZER)
        infos = [beat.model_info for beat in beats if beat.model_info is not None]
        return frozenset(name for info in infos for name in (info.name, *info.aliases))

    async def validate(self, job: Job) -> None:
        if time.time() >= job.expires_at:
            await self._change(job, into("validating", "expired"))
            return
        if not self._served():
            await asyncio.sleep(WAIT_S)
            return
        found = await loading.read(self._files, job, self._served())
        try:

            def edit(job: Job) -> bool:
                if job.status != "validating":
                    return False
                job.model, job.errors = found.model, found.errors
                if not found.errors:
                    job.total = job.counts.total = len(found.order)
                job.enter("failed" if found.errors else "in_progress", int(time.time()))
                return True

            changed = await self._change(job, edit)
            if changed.status == "in_progress" and not changed.loaded:
                await self._put(changed, found)
        finally:
            found.close()

    async def load(self, job: Job) -> None:
        """Goes on where a keeper died between checking a file and putting all of it into the queue."""
        found = await loading.read(self._files, job, frozenset({job.model}))
        try:
            if found.errors:
                log.warning("job %s is ended: its input is gone (%s)", job.id, found.errors[0].message)
                await self._change(job, into("in_progress", "cancelling"))
                return
            await self._put(job, found)
        finally:
            found.close()

    async def _put(self, job: Job, found: loading.Input) -> None:
        if self._host.settings.batch.order == "prefix":
            found.order.sort()
        async for done in loading.load(self._jobs, job, found):
            now = await self._jobs.get(job.owner, job.id)
            if now is None or now[0].status != "in_progress":
                return
            log.debug("job %s: %d of %d requests are in the queue", job.id, done, job.total)

        def edit(job: Job) -> bool:
            job.loaded = True
            return job.status == "in_progress"

        await self._change(job, edit)


def into(before: Status, status: Status, counts: Counts | None = None) -> Edit:
    def edit(job: Job) -> bool:
        if job.status != before:
            return False
        job.counts = counts or job.counts
        job.enter(status, int(time.time()))
        return True

    return edit
