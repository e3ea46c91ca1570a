"""A worker: one engine, its control queue, and its part in hand-offs. Prefill and decode are both one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from baton.bus.pace import to_next
from baton.bus.tombstones import Tombstones
from baton.engine.engine import Progress
from baton.engine.plan import StepPlan
from baton.kvcache.transports import BlockServer, Puller
from baton.protocol import subjects
from baton.protocol.errors import Code, Failure
from baton.protocol.liveness import Heartbeat, Role, State, WorkerInfo
from baton.runner.create import create
from baton.runner.triton_device import GpuUnusable
from baton.service.base import ServiceHost, StartupError
from baton.service.process import arm_watchdog
from baton.telemetry.logs import get_logger
from baton.worker.control import MESSAGES, Control
from baton.worker.figures import WorkerFigures
from baton.worker.identity import WorkerIdentity
from baton.worker.inbound import Inbound
from baton.worker.jobs import Jobs
from baton.worker.kv_events import KvEventStream
from baton.worker.loop import EngineFailed, EngineLoop
from baton.worker.outbound import Outbound
from baton.worker.receiver import Receiver
from baton.worker.setup import make_engine, make_pool, open_transports, servable, store_client
from baton.worker.store import StoreTier
from baton.worker.token_out import TokenOut

log = get_logger(__name__)

ROUND_S = 0.25
IDLE_ROUND_S = 1.0
PAUSE_S = 2.0  # a bus away for longer ends what is live
DRAIN_ROUND_S = 0.05
LEAVING_S = 1.0  # how often owners are told what could move away
SHORT_TOKENS = 16  # what has no more than these left to make ends sooner than it moves
STUCK_S = 2.0  # how long its orderly end may take then
REPORT_STEPS = 8  # full steps of work done after which routers hear of it before the next heartbeat is due
HUNG_S = 5.0  # how long owners have to move away from a hung engine before the process ends


class Worker:
    """Serves one ordered control queue; runs what it is given; hands over or decodes.

    A prefill and a decode worker differ only in what they are sent: a `Run` with a decode target is
    handed over after its first token, one without is decoded here, and offers are taken by either.
    """

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._bus = host.bus
        self._strangers: set[int] = set()  # epochs of live workers with another fingerprint
        self._unreported = 0  # tokens scheduled since the last heartbeat

    # --- life ----------------------------------------------------------------------------------------

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Loads the model, makes the pool, opens the transports, and registers.

        Raises:
            StartupError: one of these cannot be done here.
        """
        host, self._group = self._host, group
        try:
            self._runner = await asyncio.to_thread(create, host.settings)
            self._pool = await make_pool(host, self._runner)
            await asyncio.to_thread(self._runner.warm_up)
        except GpuUnusable as error:
            raise StartupError(str(error)) from error
        self._engine = make_engine(host.settings.worker, self._runner, self._pool)
        self._assemble(*await open_transports(host, self._runner, self._pool))
        inbox = await self._bus.inbox(host.subject, *MESSAGES)
        for task in (
            self._control.serve(inbox),
            self._loop.run(),
            self._housekeeping(),
            self._store.run(),
        ):
            group.create_task(task)
        host.directory.subscribe(self._peer_changed)
        self._bus.on_change(self._bus_changed)
        host.on_beat(self._report)
        host.beat.model_info = servable(self._runner.model, self._pool)
        host.beat.state = State.READY
        await host.announce()

    def _assemble(self, identity: WorkerIdentity, puller: Puller, blocks: BlockServer) -> None:
        host, bus, engine, settings = self._host, self._bus, self._engine, self._host.settings.worker
        self._puller, self._blocks = puller, blocks
        figures = self._figures = WorkerFigures(host.registry)
        out = self._out = TokenOut(bus, worker=host.id, epoch=host.epoch, gone=self._tokenizer_gone)
        self._events = KvEventStream(
            bus, engine.pool, self._spawn, model=host.model, worker=host.id, epoch=host.epoch
        )
        self._loop = EngineLoop(
            engine,
            self._runner,
            scheduled=self._scheduled,
            progressed=self._progressed,
            failed=self._step_failed,
        )
        tombstones = Tombstones()
        jobs = self._jobs = Jobs(host.id, bus, engine, self._pool, out, figures, self._loop.work, tombstones)
        receiver = Receiver(bus, engine, puller, figures, jobs, out, self._runner.prepare)
        self._inbound = Inbound(engine, jobs, receiver, self._spawn, lease_ms=settings.lease_ms)
        self._outbound = Outbound(
            identity,
            bus,
            self._pool,
            figures,
            self._spawn,
            lease_ms=settings.lease_ms,
            done=jobs.handed_over,
            failed=jobs.fail,
        )
        self._store = StoreTier(store_client(host, identity, self._pool, puller), engine, self._pool)
        self._control = Control(
            host,
            self._group,
            jobs=jobs,
            inbound=self._inbound,
            outbound=self._outbound,
            out=out,
            events=self._events,
            store=self._store,
            prepare=self._runner.prepare,
            tombstones=tombstones,
        )
        host.beat.worker = WorkerInfo(
            fingerprint=identity.fingerprint,
            geometry=self._runner.geometry,
            num_blocks=self._pool.num_blocks,
            address=identity.address,
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
        )

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; what runs ends, is handed over or moves away, within `grace_s`.

        What has not begun goes back to its owner at once. Sequences with much left to make are offered to
        their owners again and again until they have moved; `stop` gives back what is left at the end.
        """
        if not hasattr(self, "_control"):
            return
        leaving = self._control.closed = Failure(
            code=Code.DRAINING, message="this worker is draining", retry_after_ms=1_000
        )
        until = time.monotonic() + grace_s
        tell_at = 0.0
        while (len(self._jobs) or len(self._inbound)) and (now := time.monotonic()) < until:
            for job in self._jobs:
                if not (job.scheduled or job.admitted):
                    await self._jobs.fail(job, leaving)
            if now >= tell_at:
                await self._tell_owners()
                tell_at = now + LEAVING_S
            await asyncio.sleep(DRAIN_ROUND_S)

    async def _tell_owners(self) -> None:
        movable: dict[str, list[tuple[str, int]]] = {}
        for job in self._jobs:
            if job.target is None and job.left > SHORT_TOKENS and not job.sequence.forks:
                movable.setdefault(job.reply_to, []).append((job.request, job.attempt))
        for reply_to, requests in movable.items():
            await self._out.leaving(reply_to, requests)

    async def stop(self) -> None:
        """Tells the owners of what is left that this worker goes, and gives the memory back."""
        if hasattr(self, "_control"):
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

    # --- steps ---------------------------------------------------------------------------------------

    def _scheduled(self, plan: StepPlan) -> None:
        self._figures.computed(plan.num_tokens)
        self._unreported += plan.num_tokens
        self._outbound.withdraw_preempted()
        for part in plan.slices:
            job = self._jobs.get(part.key[0])
            if job is not None and not job.scheduled:
                job.scheduled = True
                if job.target is not None and job.left > 1:  # with one left it ends with its next token
                    self._outbound.begin(job, self._group)

    async def _progressed(self, progress: list[Progress]) -> None:
        await self._jobs.progressed(progress)
        await self._out.flush()
        await self._control.between_steps()
        await self._events.flush()
        if self._unreported >= REPORT_STEPS * self._host.settings.worker.max_batch_tokens:
            self._host.touch()  # a router that thinks we are full may send more

    async def _step_failed(self, plan: StepPlan) -> None:
        await self._jobs.step_failed(plan)
        await self._control.between_steps()

    # --- peers ---------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(work)

    def _tokenizer_gone(self, reply_to: str) -> None:
        self._out.forget(reply_to)
        self._spawn(self._jobs.drop_all_of(reply_to, "its tokenizer has gone"))

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if kind != "left":
            self._compare(beat)
            return
        self._strangers.discard(beat.epoch)
        if beat.role is Role.TOKENIZER:
            self._tokenizer_gone(subjects.tokens(beat.model, beat.id, beat.epoch))
        elif beat.role in (Role.PREFILL, Role.DECODE):
            self._inbound.peer_left(beat.id, beat.epoch)
            self._puller.forget(beat.epoch)
            gone = Failure(code=Code.WORKER_LOST, message=f"worker {beat.id} is gone")
            for job in self._jobs:
                if job.target is not None and (job.target.id, job.target.epoch) == (beat.id, beat.epoch):
                    self._spawn(self._jobs.fail(job, gone))

    def _compare(self, beat: Heartbeat) -> None:
        """Says it once when a worker of this model cannot be a partner of ours; routers will not pair us."""
        mine, info = self._engine.config.fingerprint, beat.worker
        if info is not None and info.fingerprint != mine and beat.epoch not in self._strangers:
            self._strangers.add(beat.epoch)
            log.error(
                "worker %s computes with %s, this one with %s: no KV blocks go between the two (are model,"
                " dtypes and block size the same?)",
                beat.id,
                info.fingerprint,
                mine,
            )

    def _bus_changed(self, up: bool) -> None:
        """What peers said meanwhile is lost, also that they gave a hand-off up: each begins anew."""
        if up:
            self._inbound.drop_all("the bus was away")

    def _alive(self, worker: str, epoch: int) -> bool:
        beat = self._host.directory.get(worker)
        return beat is not None and beat.epoch == epoch

    # --- keeping house -------------------------------------------------------------------------------

    async def _housekeeping(self) -> None:
        """Deadlines, ended streams, a bus that is away for longer than a pause, an engine that hangs."""
        while True:
            idle = not (len(self._jobs) or len(self._inbound))
            await asyncio.sleep(to_next(IDLE_ROUND_S) if idle else ROUND_S)
            now, away = time.monotonic(), self._bus.down_since
            self._out.expire(now)
            lost = away is not None and now - away > PAUSE_S
            if lost:
                self._inbound.drop_all("the bus is lost")
            elif away is None:
                self._inbound.check_senders(self._alive)
            for job in self._jobs:
                if lost or now >= job.sequence.deadline:
                    await self._jobs.drop(job, "the bus is lost" if lost else "its deadline passed")
            await self._check_step(now)

    async def _check_step(self, now: float) -> None:
        """Says so when the engine hangs, gives its work back, and ends the process, to be started again.

        Raises:
            EngineFailed: it has hung for too long.
        """
        began, limit_s = self._loop.stepping_since, self._host.settings.worker.step_timeout_ms / 1000
        if began is None or now - began <= limit_s:
            return
        words = f"a model step has not ended for {now - began:.0f} s"
        if now - began > limit_s + HUNG_S:
            arm_watchdog(STUCK_S)  # the thread of the step cannot be ended otherwise
            raise EngineFailed(words)
        if self._host.beat.state is not State.UNHEALTHY:
            log.error("%s: this worker is unhealthy", words)
            self._host.beat.state, self._host.beat.note = State.UNHEALTHY, words
            await self._host.announce()
            hung = self._control.closed = Failure(code=Code.DRAINING, message=words)
            self._inbound.drop_all(words)
            for job in self._jobs:
                await self._jobs.fail(job, hung)

    def _report(self) -> None:
        """Fills in the heartbeat just before it goes out."""
        self._unreported = 0
        load = self._engine.load()
        load.waiting += len(self._inbound)
        load.placements = self._jobs.taken()
        load.kv_event = self._events.number
        self._host.beat.load = load
        self._figures.load(load)
