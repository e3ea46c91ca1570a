"""Jobs in the key-value bucket: read, listed and changed by compare-and-set."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from baton.batch import names
from baton.batch.records import Counts, Job
from baton.bus.connection import Bus
from baton.bus.stored import Streams, WrongSequence

CHANGE_TRIES = 20

_encode = msgspec.json.Encoder().encode
_job = msgspec.json.Decoder(Job)


class Jobs:
    """Every method raises as `Streams` does, and may be called again."""

    def __init__(self, bus: Bus) -> None:
        self.streams = Streams(bus)

    async def setup(self) -> None:
        """Makes the streams that all owners share, if they are not there."""
        await self.streams.ensure(
            names.STATE_STREAM,
            subjects=[f"$KV.{names.BUCKET}.>"],
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
            deny_delete=True,
            discard="new",
        )
        await self.streams.ensure(
            names.IN_STREAM, subjects=[names.all_incoming()], retention="workqueue", discard="new"
        )
        await self.streams.ensure(names.ITEM_STREAM, subjects=[names.all_items()], discard="new")

    async def setup_owner(self, owner: str, keep_s: int) -> None:
        """Makes the stream of an owner's results."""
        await self.streams.ensure(
            names.out_stream(owner),
            subjects=[names.all_out(owner)],
            max_age=keep_s * 10**9,
            allow_rollup_hdrs=True,
            deny_delete=True,
            discard="new",
        )

    async def get(self, owner: str, id: str) -> tuple[Job, int] | None:
        """A job and its revision."""
        found = await self.streams.last(names.STATE_STREAM, names.key("job", owner, id))
        return None if found is None else (_job.decode(found.data), found.seq)

    async def create(self, job: Job) -> Job:
        """Stores a new job, and that it is to be worked on; if there is one of this id, returns that one."""
        active = names.key("active", job.owner, job.id)
        await self.streams.publish(active, b"{}")
        try:
            await self.streams.publish(names.key("job", job.owner, job.id), _encode(job), expect=0)
        except WrongSequence:
            found = await self.get(job.owner, job.id)
            if found is None:
                raise
            if found[0].over:
                await self.streams.purge(names.STATE_STREAM, active)
            return found[0]
        return job

    async def save(self, job: Job, revision: int) -> int:
        """Writes a job over the revision it was read at; its new one.

        Raises:
            WrongSequence: it has been changed meanwhile.
        """
        return await self.streams.publish(names.key("job", job.owner, job.id), _encode(job), expect=revision)

    async def change(self, owner: str, id: str, edit: Callable[[Job], bool]) -> Job | None:
        """Applies `edit`, which returns whether there is anything to write, to the job as it then is.

        Returns:
            The job as it then is; None if there is none.
        """
        for _ in range(CHANGE_TRIES):
            found = await self.get(owner, id)
            if found is None:
                return None
            job, revision = found
            if not edit(job):
                return job
            try:
                await self.save(job, revision)
            except WrongSequence:
                continue
            return job
        raise WrongSequence(f"job {id} changes all the time")

    async def of(self, owner: str) -> list[Job]:
        """All jobs of an owner, the newest first."""
        pattern = names.key("job", owner, "*")
        jobs = [_job.decode(one.data) async for one in self.streams.scan(names.STATE_STREAM, pattern)]
        return sorted(jobs, key=lambda job: (job.created_at, job.id), reverse=True)

    async def active(self) -> list[tuple[str, str]]:
        """(owner, id) of every job that is not over."""
        pattern = names.key("active", "*", "*")
        found = await self.streams.subjects(names.STATE_STREAM, pattern)
        return [(parts[-2], parts[-1]) for parts in (subject.split(".") for subject in found)]

    async def retire(self, job: Job) -> None:
        """A job is over: nobody need look at it any more."""
        await self.streams.purge(names.STATE_STREAM, names.key("active", job.owner, job.id))

    async def remove(self, owner: str, id: str) -> None:
        """Forgets a job."""
        await self.streams.purge(names.STATE_STREAM, names.key("active", owner, id))
        await self.streams.purge(names.STATE_STREAM, names.key("job", owner, id))

    async def items(self, job: Job) -> int:
        """How many requests it holds."""
        subject = names.item(job.priority, job.owner, job.id)
        return await self.streams.count(names.ITEM_STREAM, subject)

    async def counts(self, job: Job) -> Counts:
        """What the streams hold of a job that runs: requests, results, failures."""
        if job.status in ("validating", "failed") or job.over:
            return job.counts
        stream = names.out_stream(job.owner)
        results = await self.streams.count(stream, names.out(job.owner, job.id, "result", "*"))
        failed = await self.streams.count(stream, names.out(job.owner, job.id, "failed", "*"))
        total = job.total if job.total >= 0 else await self.items(job)
        return Counts(total=total, completed=max(0, results - failed), failed=failed)


def cancel(job: Job) -> bool:
    """An edit for `Jobs.change`: has a job end, if it may still."""
    if job.status not in ("validating", "in_progress"):
        return False
    job.enter("cancelling", int(time.time()))
    return True
