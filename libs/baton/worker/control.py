"""A worker's ordered control queue: every message that it is sent, and who is to act on it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

import msgspec

from baton.bus.connection import BusDown
from baton.bus.inbox import Delivery, Inbox
from baton.bus.tombstones import Tombstones
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Abandon, Commit, Offer, Ready, Refused, Renew
from baton.protocol.kvevents import KvSnapshot
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Cancel, Drain, Ended, Move, Resume, Run
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton.worker.inbound import Inbound
from baton.worker.job import Job
from baton.worker.jobs import Jobs
from baton.worker.kv_events import KvEventStream
from baton.worker.outbound import Outbound
from baton.worker.prepare import Prepare, prepared
from baton.worker.store import StoreTier
from baton.worker.token_out import TokenOut

log = get_logger(__name__)

MESSAGES = (Run, Cancel, Move, Resume, Ended, Offer, Ready, Commit, Renew, Abandon, KvSnapshot, Drain)


class Control:
    """Handles the messages one by one, in the order in which they came."""

    def __init__(
        self,
        host: ServiceHost,
        group: asyncio.TaskGroup,
        *,
        jobs: Jobs,
        inbound: Inbound,
        outbound: Outbound,
        out: TokenOut,
        events: KvEventStream,
        store: StoreTier,
        prepare: Prepare,
        tombstones: Tombstones,
    ) -> None:
        self._host = host
        self._group = group
        self._jobs = jobs
        self._inbound = inbound
        self._outbound = outbound
        self._out = out
        self._events = events
        self._store = store
        self._prepare = prepare
        self._tombstones = tombstones
        self.closed: Failure | None = None  # why nothing new is taken

    async def serve(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            try:
                await self._handle(delivery)
            except BusDown:
                log.debug("%s came as the bus went away", type(delivery.message).__name__)
            except msgspec.ValidationError as error:
                log.error("%s: %s", type(delivery.message).__name__, error)
                await delivery.respond(_reject(Code.MALFORMED, str(error)))

    async def _handle(self, delivery: Delivery) -> None:
        message = delivery.message
        match message:
            case Run():
                await self._run(delivery)
            case Cancel():
                await self._cancel(message)
            case Move():
                await self._move(delivery)
            case Offer():
                await self._offered(delivery)
            case Ready():
                self._inbound.ready(message)
            case Commit():
                await self._inbound.committed(delivery)
            case Renew():
                self._outbound.renewed(message.request, message.attempt)
            case Abandon():
                self._inbound.drop(
                    message.request, message.attempt, message.reason or "the sender gave it up"
                )
                await self._given_up(message)
            case Resume():
                await self._resume(delivery)
            case Ended():
                self._out.acknowledged(message.request, message.attempt)
            case KvSnapshot():
                await delivery.respond(await self._events.snapshot(message.cursor))
            case Drain():
                await delivery.respond(Accepted())
                self._host.request_drain(message.grace_ms)

    def _newest(self, request: str) -> int:
        """The highest attempt of a request that holds anything here; -1: none does."""
        job = self._jobs.get(request)
        return max(-1 if job is None else job.attempt, self._inbound.attempt(request))

    def _check_new(self, request: str, attempt: int) -> None:
        """Whether something of this attempt may begin here.

        Raises:
            RequestError: STALE, it was cancelled or a newer one is here; or nothing new is taken.
        """
        if self._newest(request) > attempt or self._tombstones.refuses(request, attempt, time.monotonic()):
            raise RequestError.of(Code.STALE, "this attempt is over")
        if self.closed is not None:
            raise RequestError(self.closed)

    async def _end_lower(self, request: str, attempt: int) -> None:
        """Whoever sees a higher attempt frees the lower ones."""
        words = "a newer attempt came"
        self._inbound.drop(request, attempt - 1, words)
        self._jobs.leave(request, attempt - 1)
        job = self._jobs.get(request)
        if job is not None and job.attempt < attempt:
            await self._jobs.drop(job, words)

    async def _run(self, delivery: Delivery) -> None:
        message: Run = delivery.message
        request, attempt = message.state.request, message.state.attempt
        job = self._jobs.get(request)
        if job is not None and job.attempt == attempt:
            await delivery.respond(Accepted())
            return
        try:
            self._check_new(request, attempt)
            await self._end_lower(request, attempt)
            for fork in message.forks:
                await self._end_lower(fork.request, fork.attempt)
            if message.decode is not None and message.decode.epoch == self._host.epoch:
                message.decode = None  # it stays here
            job = self._jobs.take(message)
            needs = self._prepare(job.sequence.sampling)
            if needs is None and not self._store.worth_asking(job.sequence):
                self._enter(job)
            else:
                job.task = self._group.create_task(self._enter_later(job, needs))
        except RequestError as error:
            await delivery.respond(Rejected(failure=error.failure))
        else:
            await delivery.respond(Accepted())

    def _enter(self, job: Job) -> None:
        try:
            self._jobs.enter(job)
        except RequestError:
            self._jobs.forget(job)
            raise

    async def _enter_later(self, job: Job, needs: Future[None] | None) -> None:
        """Brings blocks of the prompt back from the KV store first, while its grammar compiles.

        A miss costs a few milliseconds, and so does a grammar, save the first one of a worker.
        """
        if self._store.worth_asking(job.sequence):
            await self._store.fetch(job.sequence)
        await prepared(needs)
        job.task = None
        if job.over:
            return
        try:
            self._jobs.enter(job)
        except RequestError as error:
            await self._jobs.fail(job, error.failure)

    async def between_steps(self) -> None:
        """Offers for which a lower class makes room can be taken now."""
        for delivery in self._inbound.parked():
            await self._offered(delivery)

    async def _offered(self, delivery: Delivery) -> None:
        offer: Offer = delivery.message
        try:
            self._check_new(offer.request, offer.attempt)
        except RequestError as error:
            await delivery.respond(Refused(failure=error.failure))
            return
        await self._end_lower(offer.request, offer.attempt)
        await self._inbound.offered(delivery)

    async def _cancel(self, message: Cancel) -> None:
        self._tombstones.add(message.request, message.attempt, time.monotonic())
        self._inbound.drop(message.request, message.attempt, message.reason or "cancelled")
        self._out.acknowledged(message.request, message.attempt)
        self._jobs.leave(message.request, message.attempt)
        job = self._jobs.get(message.request)
        if job is not None and job.attempt <= message.attempt:
            await self._jobs.drop(job, message.reason)

    async def _move(self, delivery: Delivery) -> None:
        """Turns a job into one that is handed over at the next step border."""
        message: Move = delivery.message
        job = self._jobs.get(message.request)
        if job is not None and job.attempt == message.successor:
            await delivery.respond(Accepted())
        elif job is None or job.attempt != message.attempt or job.target is not None:
            await delivery.respond(_reject(Code.STALE, "this sequence cannot be moved from here"))
        else:
            job.move(message.target, message.successor, message.start)
            if job.scheduled:
                self._outbound.begin(job, self._group)
            await delivery.respond(Accepted())

    async def _given_up(self, message: Abandon) -> None:
        """The receiver gave a hand-off up."""
        job = self._jobs.get(message.request)
        if job is not None and job.attempt == message.attempt and self._outbound.sends(job):
            words = message.reason or "the receiver gave the hand-off up"
            await self._jobs.fail(job, Failure(code=Code.TRANSFER_FAILED, message=words))

    async def _resume(self, delivery: Delivery) -> None:
        message: Resume = delivery.message
        job = self._jobs.get(message.request)
        known = True
        if job is not None and job.attempt == message.attempt:
            if job.target is None or message.prompt_start >= 0:
                self._out.send_again(job.reply_to, job.sender, message.start, message.prompt_start)
        elif self._inbound.attempt(message.request) != message.attempt and not self._jobs.rides(
            message.request, message.attempt
        ):
            known = self._out.resume(message.request, message.attempt, message.start, message.prompt_start)
        await delivery.respond(Accepted() if known else _reject(Code.STALE, "this attempt is not known here"))
        await self._out.flush()


def _reject(code: Code, message: str) -> Rejected:
    return Rejected(failure=Failure(code=code, message=message))
