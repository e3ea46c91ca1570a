"""The metrics service: follows every process of the cluster, serves `/metrics`, answers `MetricsQuery`."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from aiohttp import web

from baton.bus.inbox import Delivery, Inbox
from baton.protocol import subjects
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.liveness import Heartbeat, State
from baton.protocol.request import Accepted, Rejected
from baton.protocol.stats import MetricsQuery, MetricsText, Snapshot
from baton.protocol.work import Drain
from baton.service.base import ServiceHost, StartupError
from baton.telemetry.exposition import BadSnapshot, render
from baton_services.metrics.board import Board

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FORGET_EVERY_S = 5.0
CLOSE_S = 1.0


class MetricsService:
    """Holds the newest snapshot of every process, and writes them out as one page."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._board = Board()
        self._refused: set[str] = set()  # ids whose bad snapshot has been logged
        self._runner: web.AppRunner | None = None

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Raises `StartupError` when `metrics.port` cannot be had."""
        host = self._host
        host.directory.subscribe(self._peer_changed)
        snapshots = await host.bus.inbox(subjects.all_stats(), Snapshot)
        control = await host.bus.inbox(host.subject, MetricsQuery, Drain)
        group.create_task(self._take_snapshots(snapshots))
        group.create_task(self._serve_control(control))
        group.create_task(self._forget())
        host.beat.url = await self._listen()
        host.beat.state = State.READY
        await host.announce()
        _log.info("serving %s/metrics", host.beat.url)

    async def drain(self, grace_s: float) -> None:
        """Holds nothing that would have to end."""

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def page(self) -> str:
        """The cluster's metrics now."""
        return render(self._board.snapshots(), more=self._board.up())

    async def _listen(self) -> str:
        settings = self._host.settings.metrics
        app = web.Application()
        app.router.add_get("/metrics", self._http_metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise StartupError(
                f"cannot listen on {settings.host}:{settings.port} ({_words(error)}): set metrics.port"
                " or metrics.host (--metrics-port, BATON_METRICS_PORT; port 0 takes any free one)"
            ) from error
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _http_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _take_snapshots(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            snapshot: Snapshot = delivery.message
            try:
                self._board.take(snapshot, time.monotonic())
            except BadSnapshot as error:
                if snapshot.id not in self._refused and len(self._refused) < 256:
                    self._refused.add(snapshot.id)
                    _log.warning(
                        "metrics refused: %s", error, extra={"role": snapshot.role, "id": snapshot.id}
                    )

    async def _serve_control(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            match delivery.message:
                case MetricsQuery():
                    await self._answer(delivery)
                case Drain(grace_ms=grace_ms):
                    await delivery.respond(Accepted())
                    self._host.request_drain(grace_ms)

    async def _answer(self, query: Delivery) -> None:
        try:
            await query.respond(MetricsText(text=self.page()))
        except MalformedMessage:
            words = f"the page is too large for the bus: read {self._host.beat.url}/metrics"
            await query.respond(Rejected(failure=Failure(code=Code.INTERNAL, message=words)))

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            self._board.forget(time.monotonic())

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if kind == "left":
            self._board.left(beat, time.monotonic())
        else:
            self._board.joined(beat, time.monotonic())


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
