"""A file that comes in as multipart/form-data: passed on as it comes, whatever the order of its fields."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from baton.batch import names
from baton.batch.files import Files, TooLarge
from baton.batch.records import File
from baton_services.gateway.body import BODIES
from baton_services.gateway.errors import invalid, refused, unsupported

PIECE = 65_536
MAX_FIELD = 1_024
MAX_FIELDS = 16
MAX_NAME = 255
TOTAL_S = 3_600.0
INPUT_DAYS = 30  # of a file that does not say how long it is wanted
EXPIRES_S = (3_600, 30 * 86_400)
_CLOSE = {"Connection": "close"}


class Upload:
    """One request's multipart body; the file's record is complete once all of it has been read."""

    def __init__(self, http: web.Request, owner: str) -> None:
        self._http = http
        self._idle_s = http.app[BODIES].idle_s
        self._until = time.monotonic() + TOTAL_S
        self._fields: dict[str, str] = {}
        now = int(time.time())
        self.file = File(
            id=names.new_id("file-"),
            owner=owner,
            filename="",
            purpose="",
            bytes=0,
            created_at=now,
            expires_at=now + INPUT_DAYS * 86_400,
            part="",
        )

    async def store(self, files: Files, max_bytes: int) -> File:
        """Reads and stores the file.

        Raises:
            HttpError, RequestError: no multipart body, too large, too slow, cut short, or a field is wrong.
        """
        if not self._http.content_type.startswith("multipart/"):
            words = "send multipart/form-data with the fields purpose and file"
            raise refused("unsupported_content_type", words, headers=_CLOSE)
        too_large = refused(
            "request_too_large",
            f"a file has at most {max_bytes >> 20} MB (batch.max_file_mb)",
            headers=_CLOSE,
        )
        if (self._http.content_length or 0) > max_bytes + 2**20:
            raise too_large
        try:
            return await files.write(self.file, self._content(), max_bytes=max_bytes)
        except TooLarge as error:
            raise too_large from error
        except TimeoutError as error:
            words = f"the file came too slowly: nothing for {self._idle_s:g} s"
            raise refused("request_timeout", words, headers=_CLOSE) from error
        except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
            raise invalid(f"the body is cut short, or no multipart/form-data: {error}"[:300]) from error

    async def _content(self) -> AsyncIterator[bytes]:
        reader = await self._http.multipart()
        seen = 0
        while True:
            async with asyncio.timeout(self._idle_s):
                part = await reader.next()
            if part is None:
                break
            seen += 1
            if not isinstance(part, BodyPartReader) or seen > MAX_FIELDS:
                raise invalid("file: only plain fields are taken, and few of them", "file")
            if part.name == "file":
                if self.file.filename:
                    raise invalid("file: is there twice", "file")
                self.file.filename = _name(part.filename)
                async for data in self._pieces(part):
                    yield data
            else:
                await self._field(part)
        self._check()

    async def _pieces(self, part: BodyPartReader) -> AsyncIterator[bytes]:
        while True:
            if time.monotonic() > self._until:
                raise TimeoutError
            async with asyncio.timeout(self._idle_s):
                data = await part.read_chunk(PIECE)
            if not data:
                return
            yield bytes(data)

    async def _field(self, part: BodyPartReader) -> None:
        value = bytearray()
        async for data in self._pieces(part):
            value += data
            if len(value) > MAX_FIELD:
                raise invalid(f"{(part.name or '')[:64]}: is too long", (part.name or "")[:64])
        self._fields[part.name or ""] = value.decode(errors="replace")

    def _check(self) -> None:
        """What can only be said once all fields are here."""
        if not self.file.filename:
            raise invalid("file: is required", "file")
        purpose = self._fields.get("purpose")
        if not purpose:
            raise invalid("purpose: is required", "purpose")
        if purpose != "batch":
            raise unsupported(f"purpose: {purpose[:40]!r} is not supported, only 'batch'", "purpose")
        self.file.purpose = purpose
        anchor, seconds = (self._fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return
        if anchor != "created_at":
            raise invalid("expires_after.anchor: must be 'created_at'", "expires_after.anchor")
        least, most = EXPIRES_S
        if not (seconds or "").isdecimal() or not least <= int(seconds or "") <= most:
            words = f"expires_after.seconds: is {least} to {most}"
            raise invalid(words, "expires_after.seconds")
        self.file.expires_at = self.file.created_at + int(seconds or "")


def _name(given: str | None) -> str:
    """A file's name as it is shown: printable, of bounded length, without folders."""
    name = "".join(c for c in (given or "").replace("\\", "/").rpartition("/")[2] if c.isprintable())
    return name.encode(errors="replace").decode()[:MAX_NAME] or "upload.jsonl"
