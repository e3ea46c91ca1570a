"""The end of a job: what did not come to a result, the output files, and what may be deleted."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec

from baton.batch import names, results
from baton.batch.files import Files
from baton.batch.records import Counts, File, Job, Usage
from baton.batch.results import Item
from baton.batch.state import Jobs
from baton_services.batch.outlet import Outlet

MOST = 2**40  # an output file's bytes: whatever there is

_item = msgspec.msgpack.Decoder(Item)


class Unfinished(Exception):
    """Results that were counted are not to be found yet."""


async def lapse(jobs: Jobs, outlet: Outlet, job: Job) -> None:
    """Gives every request without a result one that says that the time is up. May be done again."""
    stream = names.out_stream(job.owner)
    found = await jobs.streams.subjects(stream, names.out(job.owner, job.id, "result", "*"))
    settled = {subject.rpartition(".")[2] for subject in found}
    pattern = names.item(job.priority, job.owner, job.id)
    async for stored in jobs.streams.scan(names.ITEM_STREAM, pattern):
        if stored.subject.rpartition(".")[2] not in settled:
            item = _item.decode(stored.data)
            await outlet.store(item, results.failed(item, *results.EXPIRED))


async def purge_items(jobs: Jobs, job: Job) -> None:
    """Takes a job's requests out of the queue; those that run are given up by whoever runs them."""
    await jobs.streams.purge(names.ITEM_STREAM, names.item(job.priority, job.owner, job.id))


async def purge_results(jobs: Jobs, job: Job) -> None:
    """Results that are in the output files need not be kept twice."""
    for kind in ("result", "failed"):
        await jobs.streams.purge(names.out_stream(job.owner), names.out(job.owner, job.id, kind, "*"))


class Ending:
    """Reads a job's results once for its counts, and writes its output files on the way."""

    def __init__(self, jobs: Jobs, files: Files, job: Job, keep_s: int) -> None:
        self._jobs = jobs
        self._files = files
        self._job = job
        self._keep_s = job.output_expires_s or keep_s
        self.counts = Counts()
        self.usage = Usage()
        self.written: list[File] = []

    async def write(self) -> None:
        """Everything; `apply` then sets the job's fields.

        Raises:
            Unfinished: a job that should have all its results has not.
        """
        if self._job.name:  # a NATS client reads results where they lie
            async for _ in self._lines(failed=False):
                continue
        else:
            await self._file("output", self._lines(failed=False))
            if self.counts.failed:
                await self._file("error", self._lines(failed=True))
        whole = self._job.status == "finalizing" and not self._job.lapsed
        if whole and self.counts.completed + self.counts.failed < self._job.total:
            await self.discard()
            raise Unfinished(f"{self.counts} of {self._job.total}")
        self.counts.total = max(self._job.total, self.counts.completed + self.counts.failed)

    def apply(self, job: Job) -> None:
        job.counts = self.counts
        job.usage = self.usage
        for file in self.written:
            if file.filename.endswith("_error.jsonl"):
                job.error_file_id = file.id
            else:
                job.output_file_id = file.id

    async def discard(self) -> None:
        """Somebody else was quicker."""
        for file in self.written:
            await self._files.delete(file)

    async def _file(self, what: str, lines: AsyncIterator[bytes]) -> None:
        now = int(time.time())
        file = File(
            id=names.new_id("file-"),
            owner=self._job.owner,
            filename=f"{self._job.id}_{what}.jsonl",
            purpose="batch_output",
            bytes=0,
            created_at=now,
            expires_at=now + self._keep_s,
            part="",
        )
        await self._files.write(file, lines, max_bytes=MOST)
        if file.bytes:
            self.written.append(file)
        else:
            await self._files.delete(file)

    async def _lines(self, *, failed: bool) -> AsyncIterator[bytes]:
        """The job's results of one kind, a line each. The first reading, of those that succeeded, counts."""
        job = self._job
        subject = names.out(job.owner, job.id, "failed" if failed else "result", "*")
        async for stored in self._jobs.streams.scan(names.out_stream(job.owner), subject):
            if failed:
                yield stored.data + b"\n"
                continue
            seen = results.look(stored.data)
            if seen.failed:
                self.counts.failed += 1
            else:
                self.counts.completed += 1
                results.add_usage(self.usage, seen)
                yield stored.data + b"\n"
