"""The gateway's part in batches as a whole: its routes, and what stands behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from baton.batch.files import Files
from baton.batch.state import Jobs
from baton.bus.stored import AWAY, StoreError
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton_services.gateway.batch.batches import BatchHandlers
from baton_services.gateway.batch.files import FileHandlers
from baton_services.gateway.batch.perform import Performing
from baton_services.gateway.body import expect
from baton_services.gateway.errors import refused

log = get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BatchApi:
    def __init__(self, host: ServiceHost) -> None:
        files, jobs = Files(host.bus), Jobs(host.bus)
        settings = host.settings.batch
        self._files = FileHandlers(
            files, max_bytes=settings.max_file_mb * 2**20, max_all=settings.files_mb * 2**20
        )
        self._batches = BatchHandlers(host.bus, host.directory, jobs, files)
        self._performing = Performing(host)

    def mount(self, app: web.Application) -> None:
        """Adds the routes."""
        self._performing.mount(app)
        files, batches = self._files, self._batches
        for prefix in ("/v1", ""):
            route = app.router
            route.add_post(f"{prefix}/files", _stored(files.upload))
            route.add_get(f"{prefix}/files", _stored(files.list))
            route.add_get(f"{prefix}/files/{{file}}", _stored(files.get))
            route.add_get(f"{prefix}/files/{{file}}/content", _stored(files.content))
            route.add_delete(f"{prefix}/files/{{file}}", _stored(files.delete))
            route.add_post(f"{prefix}/batches", _stored(batches.create), expect_handler=expect)
            route.add_get(f"{prefix}/batches", _stored(batches.list))
            route.add_get(f"{prefix}/batches/{{batch}}", _stored(batches.get))
            route.add_post(f"{prefix}/batches/{{batch}}/cancel", _stored(batches.cancel))

    async def start(self, group: asyncio.TaskGroup, runner: web.AppRunner) -> None:
        """Takes requests of batches from now on."""
        await self._performing.start(group, runner)

    async def stop(self) -> None:
        await self._performing.stop()


def _stored(handler: _Handler) -> _Handler:
    """Says what is wrong when what should be stored, or read, cannot be."""

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except AWAY as error:
            words = "files and batches are not available: no batch service has started, or the bus is away"
            raise refused("no_batch_service", words, headers={"Retry-After": "1"}) from error
        except StoreError as error:
            log.error("%s %s: %s", http.method, http.path, error)
            words = "files and batches cannot be stored now; the storage may be full"
            raise refused("no_batch_service", words, headers={"Retry-After": "10"}) from error

    return handle
