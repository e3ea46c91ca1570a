"""Seeing jobs through their states. Each job has one keeper at a time, a batch service that lives; whatever
a keeper does may be done again by the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine

import msgspec

from baton.batch import names
from baton.batch.files import Files
from baton.batch.records import Counts, Job, Status
from baton.batch.state import Jobs
from baton.bus.inbox import Inbox
from baton.bus.stored import AWAY, StoreError, patiently
from baton.protocol.batch import Nudge
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import BatchMetrics
from baton_services.batch import finishing
from baton_services.batch.admission import Admission, Edit, into
from baton_services.batch.finishing import Ending, Unfinished
from baton_services.batch.outlet import Outlet

log = get_logger(__name__)

ROUND_S = 1.0
IDLE_ROUND_S = 5.0  # without jobs
SETTLE_S = 1.5  # until it is known which other batch services live
LETTING_GO_S = 3.0  # in which requests of a job that ends are given up everywhere
BROKEN_S = 10.0
LOST_S = 60.0  # an entry of a job whose record never came


class Keeper:
    """Looks at all jobs that are not over, once a second and when nudged."""

    def __init__(
        self, host: ServiceHost, jobs: Jobs, files: Files, outlet: Outlet, metrics: BatchMetrics, keep_s: int
    ) -> None:
        self._host = host
        self._jobs = jobs
        self._files = files
        self._outlet = outlet
        self._metrics = metrics
        self._keep_s = keep_s
        self._admission = Admission(host, jobs, files, self._change)
        self._busy: dict[str, asyncio.Task[None]] = {}  # jobs for which something longer is under way
        self._told: dict[str, tuple[str, Counts | None]] = {}
        self._missing: dict[str, float] = {}
        self._nudged = asyncio.Event()

    async def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        group.create_task(self._listen(await self._host.bus.inbox(names.nudge(), Nudge)))
        group.create_task(self._run())

    async def _listen(self, inbox: Inbox) -> None:
        async for _ in inbox:
            self._nudged.set()

    async def _run(self) -> None:
        await asyncio.sleep(SETTLE_S)
        while True:
            self._nudged.clear()
            active = []
            try:
                active = await self._jobs.active()
                kept = [await self._look(owner, id) for owner, id in active]
                self._metrics.jobs.set(sum(kept))
            except AWAY:
                await self._host.bus.up.wait()
            except StoreError as error:
                log.warning("jobs cannot be looked at: %s", error)
            try:
                async with asyncio.timeout(ROUND_S if active else IDLE_ROUND_S):
                    await self._nudged.wait()
            except TimeoutError:
                continue

    async def _look(self, owner: str, id: str) -> bool:
        """Does for one job what is to be done next. Whether it is ours."""
        found = await self._jobs.get(owner, id)
        if found is None:
            if time.monotonic() - self._missing.setdefault(id, time.monotonic()) > LOST_S:
                await self._jobs.remove(owner, id)
            return False
        self._missing.pop(id, None)
        job = found[0]
        if id in self._busy:
            return True
        if not await self._ours(job):
            return False
        if job.over:
            self._spawn(job, self._retire(job))
        elif job.status == "validating":
            self._spawn(job, self._admission.validate(job))
        elif job.status == "in_progress" and job.input_file_id and not job.loaded:
            self._spawn(job, self._admission.load(job))
        elif job.status == "in_progress":
            await self._follow(job)
        elif job.status == "finalizing":
            self._spawn(job, self._finish(job))
        else:
            self._spawn(job, self._cancel(job))
        return True

    async def _ours(self, job: Job) -> bool:
        """Takes a job whose keeper is gone."""
        me = (self._host.id, self._host.epoch)
        if (job.keeper, job.keeper_epoch) == me:
            return True
        keeper = self._host.directory.get(job.keeper) if job.keeper else None
        if (keeper is not None and keeper.epoch == job.keeper_epoch) or self._host.stopping.is_set():
            return False
        before = (job.keeper, job.keeper_epoch)

        def take(job: Job) -> bool:
            if (job.keeper, job.keeper_epoch) != before:
                return False
            job.keeper, job.keeper_epoch = me
            return True

        taken = await self._jobs.change(job.owner, job.id, take)
        if taken is None or (taken.keeper, taken.keeper_epoch) != me:
            return False
        await self._jobs.setup_owner(job.owner, self._keep_s)
        return True

    def _spawn(self, job: Job, work: Coroutine[None, None, None]) -> None:
        async def owned() -> None:
            try:
                await work
            except AWAY:
                log.info("job %s waits for the bus", job.id)
            except (StoreError, Unfinished) as error:
                log.warning("job %s: %s; tried again", job.id, error)
                await asyncio.sleep(ROUND_S)
            except Exception:  # one job that we cannot deal with does not stop the others
                log.exception("job %s; tried again", job.id)
                await asyncio.sleep(BROKEN_S)
            finally:
                del self._busy[job.id]
                self._nudged.set()

        self._busy[job.id] = self._group.create_task(owned())

    async def _change(self, job: Job, edit: Edit) -> Job:
        changed = await patiently(lambda: self._jobs.change(job.owner, job.id, edit))
        if changed is None:
            raise StoreError(f"job {job.id} has been removed")
        if self._told.get(job.id, ("", None))[0] != changed.status:
            await self._tell(changed, changed.counts)
        return changed

    # --- while requests run ------------------------------------------------------------------------------

    async def _follow(self, job: Job) -> None:
        """Progress, and whether that was all."""
        counts = await self._jobs.counts(job)
        await self._tell(job, counts)
        if job.total < 0:
            if job.closed_at and await self._all_taken(job.closed_at):
                total = await self._jobs.items(job)
                await self._change(job, _total(total))
        elif counts.completed + counts.failed >= job.total:
            await self._change(job, into("in_progress", "finalizing", counts))
            self._nudged.set()
            return
        if time.time() >= job.expires_at:
            self._spawn(job, self._lapse(job))

    async def _all_taken(self, seq: int) -> bool:
        """Whether everything that clients sent up to this has been dealt with."""
        info = await self._jobs.streams.consumer_info(names.IN_STREAM, names.INTAKE)
        idle = not info["num_pending"] and not info["num_ack_pending"]
        return idle or int(info["ack_floor"]["stream_seq"]) >= seq

    async def _lapse(self, job: Job) -> None:
        def edit(job: Job) -> bool:
            job.lapsed = True
            return job.status == "in_progress"

        changed = await self._change(job, edit)
        if changed.status != "in_progress":
            return
        await asyncio.sleep(LETTING_GO_S)
        await finishing.lapse(self._jobs, self._outlet, changed)
        await self._change(job, into("in_progress", "finalizing"))

    # --- the end -----------------------------------------------------------------------------------------

    async def _finish(self, job: Job) -> None:
        await self._write(job, "expired" if job.lapsed else "completed")

    async def _cancel(self, job: Job) -> None:
        await finishing.purge_items(self._jobs, job)
        await asyncio.sleep(LETTING_GO_S)
        await self._write(job, "cancelled")

    async def _write(self, job: Job, status: Status) -> None:
        ending = Ending(self._jobs, self._files, job, self._keep_s)
        await ending.write()
        before = job.status

        def edit(job: Job) -> bool:
            if not into(before, status)(job):
                return False
            ending.apply(job)
            return True

        changed = await self._change(job, edit)
        if {file.id for file in ending.written} - {changed.output_file_id, changed.error_file_id}:
            await ending.discard()
        await self._retire(changed)

    async def _retire(self, job: Job) -> None:
        await finishing.purge_items(self._jobs, job)
        if not job.name:
            await finishing.purge_results(self._jobs, job)
        await self._jobs.retire(job)
        self._told.pop(job.id, None)

    async def _tell(self, job: Job, counts: Counts) -> None:
        """Publishes progress, if there was any."""
        if self._told.get(job.id) == (job.status, counts):
            return
        self._told[job.id] = (job.status, counts)
        told = {
            "t": "progress",
            "job": job.name or job.id,
            "status": job.status,
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
        }
        data = (msgspec.msgpack if job.packed else msgspec.json).encode(told)
        subject = names.out(job.owner, job.id, "progress")
        await self._jobs.streams.publish(subject, data, headers={"Nats-Rollup": "sub"})


def _total(total: int) -> Edit:
    def edit(job: Job) -> bool:
        if job.total >= 0:
            return False
        job.total = total
        return True

    return edit
