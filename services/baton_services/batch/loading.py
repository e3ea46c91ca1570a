"""From a batch's input file to its requests in the queue: checked whole first, then put in prefix order."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import IO

import msgspec

from baton.batch import names
from baton.batch.files import Files
from baton.batch.lines import MAX_BYTES, Checker, split
from baton.batch.order import Key, prefix_key
from baton.batch.records import Job, LineError
from baton.batch.results import Item
from baton.batch.state import Jobs
from baton.bus.stored import WrongSequence, patiently

TOGETHER = 64  # requests on their way to the queue at once
TOGETHER_BYTES = 4 * 2**20
BREATH = 64  # lines checked before others of this process get their turn


@dataclass(slots=True)
class Input:
    """A checked input: on disk, with what is needed to find each request again in the best order."""

    file: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    model: str = ""
    errors: list[LineError] = field(default_factory=list)
    order: list[tuple[Key, int, int]] = field(default_factory=list)  # prefix, place in `file`, bytes

    def close(self) -> None:
        self.file.close()


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


async def read(files: Files, job: Job, served: frozenset[str]) -> Input:
    """Checks a job's input against the rules; every error names its line.

    Raises:
        StoreError: the content is not all there. As `Files.read`.
    """
    found = Input()
    try:
        await _read(files, job, served, found)
    except BaseException:
        found.close()
        raise
    return found


async def _read(files: Files, job: Job, served: frozenset[str], found: Input) -> None:
    record = await files.get(job.owner, job.input_file_id)
    if record is None:
        words = f"there is no file {job.input_file_id!r}"
        found.errors.append(LineError(code="invalid_file", message=words, param="input_file_id"))
        return
    if record.bytes > MAX_BYTES:
        words = f"the file has {record.bytes} bytes, a batch at most {MAX_BYTES}"
        found.errors.append(LineError(code="file_too_large", message=words, param="input_file_id"))
        return
    checker, place = Checker(job.endpoint, job.models, served), 0
    async for number, raw in split(files.read(record)):
        line = checker.check(number, raw)
        if line is not None and raw is not None:
            found.file.write(raw)
            key = prefix_key(job.endpoint, msgspec.json.decode(line.body))
            found.order.append((key, place, len(raw)))
            place += len(raw)
        if number % BREATH == 0:
            await asyncio.sleep(0)
    found.errors = checker.errors
    found.model = checker.model
    if not checker.count and not checker.errors:
        words = "the file holds no request"
        found.errors.append(LineError(code="empty_file", message=words, param="input_file_id"))


async def load(jobs: Jobs, job: Job, found: Input) -> AsyncIterator[int]:
    """Puts a checked input's requests into the queue; yields how many are there, from time to time.

    What is there already stays as it is.
    """
    together: list[tuple[str, bytes]] = []
    size = done = 0
    for _, place, length in found.order:
        found.file.seek(place)
        line = msgspec.json.decode(found.file.read(length), type=_Line)
        item = Item(
            job=job.id,
            owner=job.owner,
            custom_id=line.custom_id,
            endpoint=job.endpoint,
            body=bytes(line.body),
        )
        data = msgspec.msgpack.encode(item)
        together.append((names.item(job.priority, job.owner, job.id, item.token), data))
        size += len(data)
        if len(together) >= TOGETHER or size >= TOGETHER_BYTES:
            await asyncio.gather(*(_put(jobs, subject, data) for subject, data in together))
            done += len(together)
            together, size = [], 0
            yield done
    await asyncio.gather(*(_put(jobs, subject, data) for subject, data in together))
    yield done + len(together)


async def _put(jobs: Jobs, subject: str, data: bytes) -> None:
    try:
        await patiently(lambda: jobs.streams.publish(subject, data, expect=0))
    except WrongSequence:
        return
