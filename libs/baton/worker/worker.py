"""A worker: one engine, its control queue, and its part in hand-offs. Prefill and decode are both one."""

from __future__ import annotations

import asyncio
import time

from baton.bus.connection import BusDown
from baton.bus.inbox import Delivery, Inbox
from baton.bus.tombstones import Tombstones
from baton.engine.engine import Progress
from baton.engine.plan import StepPlan
from baton.kvcache.transports import BlockServer, Puller
from baton.protocol import subjects
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Abandon, Commit, Offer, Ready, Renew
from baton.protocol.kvevents import KvSnapshot
from baton.protocol.liveness import Heartbeat, Role, State, WorkerInfo
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Cancel, Drain, Ended, Resume, Run
from baton.runner.create import create
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton.worker.figures import WorkerFigures
from baton.worker.identity import WorkerIdentity
from baton.worker.inbound import Inbound
from baton.worker.job import Job
from baton.worker.jobs import Jobs
from baton.worker.kv_events import KvEventStream
from baton.worker.loop import EngineLoop
from baton.worker.outbound import Outbound
from baton.worker.setup import make_engine, make_pool, open_transports, store_client
from baton.worker.store import StoreTier
from baton.worker.token_out import TokenOut

log = get_logger(__name__)

ROUND_S = 0.25
PAUSE_S = 2.0  # a bus away for longer ends what is live


class Worker:
    """Serves one ordered control queue; runs what it is given; hands over or decodes.

    A prefill and a decode worker differ only in what they are sent: a `Run` with a decode target is
    handed over after its first token, one without is decoded here, and offers are taken by either.
    """

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._bus = host.bus
        self._tombstones = Tombstones()
        self._draining = False

    # --- life ----------------------------------------------------------------------------------------

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Loads the model, makes the pool, opens the transports, and registers.

        Raises:
            StartupError: one of these cannot be done here.
        """
        host, self._group = self._host, group
        self._runner = await asyncio.to_thread(create, host.settings)
        self._pool = await make_pool(host, self._runner)
        await asyncio.to_thread(self._runner.warm_up)
        self._engine = make_engine(host.settings.worker, self._runner, self._pool)
        self._assemble(*await open_transports(host, self._runner, self._pool))
        inbox = await self._bus.inbox(
            host.subject, Run, Cancel, Resume, Ended, Offer, Ready, Commit, Renew, Abandon, KvSnapshot, Drain
        )
        for task in (self._serve(inbox), self._loop.run(), self._housekeeping(), self._store.run()):
            group.create_task(task)
        host.directory.subscribe(self._peer_changed)
        host.on_beat(self._report)
        host.beat.model_info = self._runner.model
        host.beat.state = State.READY
        await host.announce()

    def _assemble(self, identity: WorkerIdentity, puller: Puller, blocks: BlockServer) -> None:
        host, settings = self._host, self._host.settings.worker
        self._puller, self._blocks = puller, blocks
        figures = self._figures = WorkerFigures(host.registry)
        self._out = TokenOut(self._bus, worker=host.id, epoch=host.epoch, gone=self._tokenizer_gone)
        self._events = KvEventStream(self._bus, self._engine.pool, host.model, host.id, host.epoch)
        self._loop = EngineLoop(
            self._engine,
            self._runner,
            scheduled=self._scheduled,
            progressed=self._progressed,
            failed=self._step_failed,
        )
        self._jobs = Jobs(host.id, self._bus, self._engine, self._out, figures, self._loop.work)
        self._outbound = Outbound(
            identity,
            self._bus,
            self._pool,
            figures,
            lease_ms=settings.lease_ms,
            done=self._jobs.handed_over,
            failed=self._jobs.fail,
        )
        self._inbound = Inbound(
            self._bus,
            self._engine,
            puller,
            self._tombstones,
            figures,
            self._jobs,
            self._out,
            lease_ms=settings.lease_ms,
        )
        self._store = StoreTier(store_client(host, identity, self._pool, puller), self._engine, self._pool)
        host.beat.worker = WorkerInfo(
            fingerprint=identity.fingerprint,
            geometry=self._runner.geometry,
            num_blocks=self._pool.num_blocks,
            address=identity.address,
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
        )

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; waits for what runs to end, at most `grace_s`."""
        self._draining = True
        until = time.monotonic() + grace_s
        while (len(self._jobs) or len(self._inbound)) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Tells the owners of what is left that this worker goes, and gives the memory back."""
        if hasattr(self, "_jobs"):
            leaving = Failure(code=Code.DRAINING, message="the worker is stopping")
            for job in self._jobs:
                await self._jobs.fail(job, leaving)
            await asyncio.to_thread(self._loop.close)
            await self._blocks.stop()
            self._puller.close()
        if hasattr(self, "_runner"):
            self._runner.close()
        if hasattr(self, "_pool"):
            self._pool.close()

    # --- control -------------------------------------------------------------------------------------

    async def _serve(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            try:
                await self._handle(delivery)
            except BusDown:
                log.debug("%s came as the bus went away", type(delivery.message).__name__)

    async def _handle(self, delivery: Delivery) -> None:
        message = delivery.message
        match message:
            case Run():
                await self._run(delivery)
            case Cancel():
                await self._cancel(message)
            case Offer():
                await self._inbound.offered(delivery, self._group, draining=self._draining)
            case Ready():
                self._inbound.ready(message)
            case Commit():
                await self._inbound.committed(delivery)
            case Renew():
                self._outbound.renewed(message.request, message.attempt)
            case Abandon():
                self._inbound.drop(message.request, message.attempt)
                await self._given_up(message)
            case Resume():
                await self._resume(delivery)
            case Ended():
                self._out.acknowledged(message.request, message.attempt)
            case KvSnapshot():
                await delivery.respond(self._events.snapshot(message.cursor))
            case Drain():
                await delivery.respond(Accepted())
                self._host.request_drain(message.grace_ms)

    async def _run(self, delivery: Delivery) -> None:
        message: Run = delivery.message
        state = message.state
        before = self._jobs.get(state.request)
        if before is not None and before.attempt == state.attempt:
            await delivery.respond(Accepted())
            return
        newer = before is not None and before.attempt > state.attempt
        if newer or self._tombstones.refuses(state.request, state.attempt, time.monotonic()):
            await delivery.respond(_reject(Code.STALE, "this attempt was cancelled"))
            return
        if self._draining:
            await delivery.respond(_reject(Code.DRAINING, "this worker is draining"))
            return
        if before is not None:
            await self._jobs.drop(before, "a newer attempt came")
        job = self._jobs.take(message)
        if self._store.worth_asking(job.sequence):
            await delivery.respond(Accepted())
            job.task = self._group.create_task(self._enter_from_store(job))
            return
        try:
            self._jobs.enter(job)
        except RequestError as error:
            self._jobs.forget(job)
            await delivery.respond(Rejected(failure=error.failure))
        else:
            await delivery.respond(Accepted())

    async def _enter_from_store(self, job: Job) -> None:
        """Brings blocks of the prompt back from the KV store first. A miss costs a few milliseconds."""
        await self._store.fetch(job.sequence)
        job.task = None
        if job.over:
            return
        try:
            self._jobs.enter(job)
        except RequestError as error:
            await self._jobs.fail(job, error.failure)

    async def _cancel(self, message: Cancel) -> None:
        self._tombstones.add(message.request, message.attempt, time.monotonic())
        self._inbound.drop(message.request, message.attempt)
        self._out.acknowledged(message.request, message.attempt)
        job = self._jobs.get(message.request)
        if job is not None and job.attempt <= message.attempt:
            await self._jobs.drop(job, message.reason)

    async def _given_up(self, message: Abandon) -> None:
        """The receiver gave a hand-off up."""
        job = self._jobs.get(message.request)
        if job is not None and job.attempt == message.attempt and job.target is not None:
            words = message.reason or "the receiver gave the hand-off up"
            await self._jobs.fail(job, Failure(code=Code.TRANSFER_FAILED, message=words))

    async def _resume(self, delivery: Delivery) -> None:
        message: Resume = delivery.message
        job = self._jobs.get(message.request)
        known = True
        if job is not None and job.attempt == message.attempt:
            if job.target is None:
                self._out.put(job.reply_to, job.sender.since(message.start))
        elif not self._inbound.knows(message.request, message.attempt):
            known = self._out.resume(message.request, message.attempt, message.start)
        await delivery.respond(Accepted() if known else _reject(Code.STALE, "this attempt is not known here"))
        await self._out.flush()

    # --- steps ---------------------------------------------------------------------------------------

    def _scheduled(self, plan: StepPlan) -> None:
        self._figures.computed(plan.num_tokens)
        for part in plan.slices:
            job = self._jobs.get(part.key[0])
            if job is not None and not job.scheduled:
                job.scheduled = True
                if job.target is not None:
                    self._outbound.begin(job, self._group)

    async def _progressed(self, progress: list[Progress]) -> None:
        await self._jobs.progressed(progress)
        await self._out.flush()
        await self._events.flush()

    async def _step_failed(self, plan: StepPlan) -> None:
        await self._jobs.step_failed(plan)

    # --- peers ---------------------------------------------------------------------------------------

    def _tokenizer_gone(self, reply_to: str) -> None:
        self._group.create_task(self._jobs.drop_all_of(reply_to, "its tokenizer has gone"))

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if kind != "left":
            return
        if beat.role is Role.TOKENIZER:
            self._tokenizer_gone(subjects.tokens(beat.model, beat.id, beat.epoch))
        elif beat.role in (Role.PREFILL, Role.DECODE):
            self._inbound.peer_left(beat.id, beat.epoch)
            self._puller.forget(beat.epoch)
            gone = Failure(code=Code.WORKER_LOST, message=f"worker {beat.id} is gone")
            for job in self._jobs:
                if job.target is not None and (job.target.id, job.target.epoch) == (beat.id, beat.epoch):
                    self._group.create_task(self._jobs.fail(job, gone))

    async def _housekeeping(self) -> None:
        """Deadlines, ended streams, and a bus that is away for longer than a pause."""
        while True:
            await asyncio.sleep(ROUND_S)
            now, away = time.monotonic(), self._bus.down_since
            self._out.expire(now)
            lost = away is not None and now - away > PAUSE_S
            for job in self._jobs:
                if lost or now >= job.sequence.deadline:
                    await self._jobs.drop(job, "the bus is lost" if lost else "its deadline passed")

    def _report(self) -> None:
        """Fills in the heartbeat just before it goes out."""
        load = self._engine.load()
        load.placements = self._jobs.taken()
        load.kv_event = self._events.number
        self._host.beat.load = load
        self._figures.load(load)


def _reject(code: Code, message: str) -> Rejected:
    return Rejected(failure=Failure(code=code, message=message))
