"""Files: records in the key-value bucket, contents in an object store that `nats object` can read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import msgspec

from baton.batch import names
from baton.batch.records import File
from baton.bus.connection import Bus, BusDown, CallTimeout, NoResponder
from baton.bus.stored import StoreError, Streams, patiently

CHUNK = 512 * 1024
READ_AHEAD = 4  # chunks asked for at once
CLEAN_UP_S = 5.0
PATIENCE_S = 10.0  # for a server that is away in the middle of a file
ORPHAN_S = 900.0  # content without a record, and that old, is what a cut-off upload left

_encode = msgspec.json.Encoder().encode
_file = msgspec.json.Decoder(File)


class TooLarge(Exception):
    """The content is larger than allowed."""


class Files:
    """Every method raises as `Streams` does."""

    def __init__(self, bus: Bus) -> None:
        self._streams = Streams(bus)

    async def setup(self) -> None:
        # Without a limit of its own, which the server would set aside at once, whatever there is on its disk.
        await self._streams.ensure(
            names.FILE_STREAM,
            subjects=[f"$O.{names.FILES}.C.>", f"$O.{names.FILES}.M.>"],
            allow_rollup_hdrs=True,
            discard="new",
        )

    async def size(self) -> int:
        """Bytes that all files take together."""
        return await self._streams.size(names.FILE_STREAM)

    async def write(self, file: File, content: AsyncIterator[bytes], *, max_bytes: int) -> File:
        """Stores a file; its `bytes` and `part` are filled in. Nothing is left of one that is cut off.

        Raises:
            TooLarge: it has more than `max_bytes`. Whatever `content` raises.
        """
        file.part = uuid.uuid4().hex
        try:
            await self._write_content(file, content, max_bytes)
            subject = names.key("file", file.owner, file.id)
            await self._streams.publish(subject, _encode(file))
        except BaseException:
            with contextlib.suppress(BusDown, CallTimeout, NoResponder, StoreError, TimeoutError):
                await asyncio.shield(asyncio.wait_for(self._purge(file), CLEAN_UP_S))
            raise
        return file

    async def _write_content(self, file: File, content: AsyncIterator[bytes], max_bytes: int) -> None:
        subject, sum_, chunks, size = names.chunk(file.part), hashlib.sha256(), 0, 0
        async for data in _sized(content):
            size += len(data)
            if size > max_bytes:
                raise TooLarge
            sum_.update(data)
            chunks += 1
            await self._store(subject, data, f"{file.part}.{chunks}")
        file.bytes = size
        meta = {
            "name": file.id,
            "bucket": names.FILES,
            "nuid": file.part,
            "size": size,
            "chunks": chunks,
            "digest": "SHA-256=" + base64.urlsafe_b64encode(sum_.digest()).decode(),
            "mtime": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "options": {"max_chunk_size": CHUNK},
        }
        await self._streams.publish(names.meta(file.id), _encode(meta), headers={"Nats-Rollup": "sub"})

    async def _store(self, subject: str, data: bytes, once: str) -> None:
        """Waits out a pause of the bus; `once` keeps a chunk that did arrive from being stored again."""
        headers = {"Nats-Msg-Id": once}
        await patiently(lambda: self._streams.publish(subject, data, headers=headers), for_s=PATIENCE_S)

    async def get(self, owner: str, id: str) -> File | None:
        """A file's record, unless its time is up."""
        found = await self._streams.last(names.STATE_STREAM, names.key("file", owner, id))
        file = None if found is None else _file.decode(found.data)
        return None if file is None or _expired(file) else file

    async def of(self, owner: str) -> list[File]:
        """All files of an owner, the newest first."""
        files = [file async for file in self._records(owner) if not _expired(file)]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    async def read(self, file: File) -> AsyncIterator[bytes]:
        """The content, chunk by chunk.

        Raises:
            StoreError: some of it is missing (it was deleted meanwhile).
        """
        subject, size, after = names.chunk(file.part), 0, 0
        while found := await self._streams.page(names.FILE_STREAM, subject, after=after, limit=READ_AHEAD):
            for chunk in found:
                size += len(chunk.data)
                yield chunk.data
            after = found[-1].seq
        if size != file.bytes:
            raise StoreError(f"file {file.id}: {size} of {file.bytes} bytes are there", 404)

    async def delete(self, file: File) -> None:
        await self._streams.purge(names.STATE_STREAM, names.key("file", file.owner, file.id))
        await self._purge(file)

    async def sweep(self, orphan_s: float = ORPHAN_S) -> int:
        """Deletes files whose time is up, and contents without a record. Returns how many."""
        removed, known = 0, set()
        parts = await self._streams.subjects(names.FILE_STREAM, names.chunk("*"))
        async for file in self._records("*"):
            if _expired(file):
                await self.delete(file)
                removed += 1
            else:
                known.add(names.chunk(file.part))
        for subject in parts:
            if subject in known:
                continue
            newest = await self._streams.last(names.FILE_STREAM, subject)
            if newest is not None and time.time() - newest.time > orphan_s:
                await self._streams.purge(names.FILE_STREAM, subject)
                removed += 1
        return removed

    async def _records(self, owner: str) -> AsyncIterator[File]:
        pattern = names.key("file", owner, "*")
        async for one in self._streams.scan(names.STATE_STREAM, pattern):
            yield _file.decode(one.data)

    async def _purge(self, file: File) -> None:
        await self._streams.purge(names.FILE_STREAM, names.chunk(file.part))
        await self._streams.purge(names.FILE_STREAM, names.meta(file.id))


def _expired(file: File) -> bool:
    return bool(file.expires_at) and time.time() >= file.expires_at


async def _sized(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in chunks of `CHUNK`."""
    waiting = bytearray()
    async for data in content:
        waiting += data
        while len(waiting) >= CHUNK:
            yield bytes(waiting[:CHUNK])
            del waiting[:CHUNK]
    if waiting:
        yield bytes(waiting)
