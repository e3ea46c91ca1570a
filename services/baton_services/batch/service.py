"""The batch service: takes work, sees to jobs, answers to nobody but its queue."""

from __future__ import annotations

import asyncio
import time

from baton.batch import names
from baton.batch.files import Files
from baton.batch.state import Jobs
from baton.bus.connection import BusDown, BusRefused
from baton.bus.inbox import Inbox
from baton.bus.jetstream import require_jetstream
from baton.bus.stored import AWAY, StoreError, patiently
from baton.protocol.liveness import State
from baton.protocol.request import Accepted
from baton.protocol.work import Drain
from baton.service.base import ServiceHost, StartupError
from baton.telemetry.metrics import BatchMetrics
from baton_services.batch.dispatch import ACK_WAIT_S, MAX_PENDING, Dispatcher
from baton_services.batch.intake import Intake
from baton_services.batch.jobcache import JobCache
from baton_services.batch.keeper import Keeper
from baton_services.batch.outlet import Outlet
from baton_services.batch.performer import Performer
from baton_services.batch.requests import Runner
from baton_services.batch.sweeper import Sweeper

START_S = 20.0  # for a server that is still reading its store


class BatchService:
    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        settings = host.settings.batch
        self._jobs = Jobs(host.bus)
        self._files = Files(host.bus)
        metrics = BatchMetrics(host.registry)
        outlet = Outlet(self._jobs)
        self._performer = Performer(host)
        runner = Runner(self._performer, JobCache(self._jobs).get, max_attempts=settings.max_attempts)
        self._dispatcher = Dispatcher(host, runner, outlet, metrics)
        keep_s = settings.keep_days * 86_400
        self._keeper = Keeper(host, self._jobs, self._files, outlet, metrics, keep_s)
        self._intake = Intake(host, self._jobs, keep_s)
        self._sweeper = Sweeper(host, self._jobs, self._files, keep_s)

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Makes what it needs in JetStream, then begins.

        Raises:
            StartupError: JetStream is off, or refuses.
        """
        try:
            await require_jetstream(self._host.bus)
        except (BusRefused, BusDown) as error:
            raise StartupError(
                f"batch jobs need JetStream. {error}; or leave batch out (--batch 0)"
            ) from error
        try:
            await patiently(self._set_up, for_s=START_S)
        except (StoreError, *AWAY) as error:
            raise StartupError(f"JetStream does not take the streams of batch jobs: {error}") from error
        group.create_task(self._serve_control(await self._host.bus.inbox(self._host.subject, Drain)))
        await self._performer.start(group)
        await self._dispatcher.start(group)
        await self._keeper.start(group)
        await self._intake.start(group)
        group.create_task(self._sweeper.run())
        self._host.beat.state = State.READY
        await self._host.announce()

    async def _set_up(self) -> None:
        streams = self._jobs.streams
        await self._jobs.setup()
        await self._files.setup()
        shared = {"ack_policy": "explicit", "ack_wait": int(ACK_WAIT_S * 1e9), "max_ack_pending": MAX_PENDING}
        for priority in names.PRIORITIES:
            subject = names.items_of(priority)
            await streams.consumer(names.ITEM_STREAM, priority, subject, durable_name=priority, **shared)
        await streams.consumer(
            names.IN_STREAM, names.INTAKE, names.all_incoming(), durable_name=names.INTAKE, **shared
        )

    async def _serve_control(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            await delivery.respond(Accepted())
            self._host.request_drain(delivery.message.grace_ms)

    async def drain(self, grace_s: float) -> None:
        """Ends the requests that run; others go on with those that wait."""
        await self._dispatcher.drain()
        until = time.monotonic() + grace_s
        while self._dispatcher.busy and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Nothing outside this process is held."""
