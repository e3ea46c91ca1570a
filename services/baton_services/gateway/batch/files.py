"""`/v1/files`: contents lie in the object store, each file belongs to the key that uploaded it."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.batch import names
from baton.batch.files import Files
from baton.batch.records import File, shown_file
from baton_services.gateway.batch.paging import limit, listed, page
from baton_services.gateway.batch.upload import Upload
from baton_services.gateway.errors import invalid, refused
from baton_services.gateway.keys import caller

DEFAULT_LIMIT = 10_000


class FileHandlers:
    def __init__(self, files: Files, *, max_bytes: int, max_all: int) -> None:
        """`max_bytes`: of one file; `max_all`: of all files of all keys together."""
        self._files = files
        self._max_bytes = max_bytes
        self._max_all = max_all

    async def upload(self, http: web.Request) -> web.Response:
        if await self._files.size() >= self._max_all:
            words = (
                f"files take {self._max_all >> 20} MB, which is all they may (batch.files_mb): delete some"
            )
            raise refused("no_batch_service", words, headers={"Retry-After": "60", "Connection": "close"})
        upload = Upload(http, names.owner_token(caller(http).owner))
        return _json(shown_file(await upload.store(self._files, self._max_bytes)))

    async def list(self, http: web.Request) -> web.Response:
        size = limit(http, DEFAULT_LIMIT, DEFAULT_LIMIT)
        order = http.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order: is asc or desc", "order")
        purpose = http.query.get("purpose")
        found = await self._files.of(names.owner_token(caller(http).owner))
        found = [file for file in found if purpose in (None, file.purpose)]
        if order == "asc":
            found.reverse()
        shown, more = page(http, found, size)
        return _json(listed([shown_file(file) for file in shown], more))

    async def get(self, http: web.Request) -> web.Response:
        return _json(shown_file(await self._file(http)))

    async def content(self, http: web.Request) -> web.StreamResponse:
        file = await self._file(http)
        response = web.StreamResponse(
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f'attachment; filename="{_ascii(file.filename)}"',
            }
        )
        response.content_length = file.bytes
        await response.prepare(http)
        if http.method != "HEAD":
            async for chunk in self._files.read(file):
                await response.write(chunk)
        await response.write_eof()
        return response

    async def delete(self, http: web.Request) -> web.Response:
        file = await self._file(http)
        await self._files.delete(file)
        return _json({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, http: web.Request) -> File:
        id = http.match_info["file"]
        owner = names.owner_token(caller(http).owner)
        file = await self._files.get(owner, id) if names.check_id(id) else None
        if file is None:
            raise refused("not_found", f"there is no file {id[:80]!r}", param="file_id")
        return file


def _ascii(name: str) -> str:
    return "".join(c if c.isascii() and c not in '"\\' else "_" for c in name)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
