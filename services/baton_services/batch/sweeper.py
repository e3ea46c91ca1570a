"""Deleting what nobody needs: files whose time is up, what cut-off uploads left, jobs long over."""

from __future__ import annotations

import asyncio
import time

from baton.batch import names
from baton.batch.files import Files
from baton.batch.state import Jobs
from baton.bus.stored import AWAY, StoreError
from baton.protocol.liveness import Role
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger

log = get_logger(__name__)

ROUND_S = 60.0


class Sweeper:
    """Works in the batch service that started first."""

    def __init__(self, host: ServiceHost, jobs: Jobs, files: Files, keep_s: int) -> None:
        self._host = host
        self._jobs = jobs
        self._files = files
        self._keep_s = keep_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            services = self._host.directory.live(Role.BATCH)
            if not services or services[0].id != self._host.id:
                continue
            try:
                removed = await self._files.sweep() + await self._old_jobs()
            except AWAY:
                continue
            except StoreError as error:
                log.warning("cannot sweep: %s", error)
            else:
                if removed:
                    log.info("swept away %d files and jobs", removed)

    async def _old_jobs(self) -> int:
        """Forgets jobs that were made so long ago that their results are gone."""
        removed = 0
        for subject in await self._jobs.streams.subjects(names.STATE_STREAM, names.key("job", "*", "*")):
            owner, id = subject.split(".")[-2:]
            found = await self._jobs.get(owner, id)
            if found is not None and found[0].over and time.time() > found[0].expires_at + self._keep_s:
                await self._jobs.remove(owner, id)
                removed += 1
        return removed
