"""The jobs of a worker: from `Run` or a commit, through steps, to their last token or their failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

from baton.bus.connection import Bus, BusDown
from baton.bus.streams import StreamSender
from baton.bus.tombstones import Tombstones
from baton.engine.engine import Engine, Progress
from baton.engine.plan import StepPlan
from baton.engine.progress import Forked
from baton.engine.reservations import Reservation
from baton.engine.scoring import packed
from baton.engine.sequence import Sequence, Status
from baton.kvcache.pool import KvPool
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Abandon, Commit, Committed
from baton.protocol.sequence import Fork, SequenceState
from baton.protocol.work import Run
from baton.telemetry.logs import get_logger
from baton.worker.figures import WorkerFigures
from baton.worker.job import Job
from baton.worker.token_out import TokenOut

log = get_logger(__name__)


class Jobs:
    """One job a request. Each ends once: finished, handed over, failed (its owner is told) or dropped.

    `work` is set whenever the engine may have something to do.
    """

    def __init__(
        self,
        worker: str,
        bus: Bus,
        engine: Engine,
        pool: KvPool,
        out: TokenOut,
        figures: WorkerFigures,
        work: asyncio.Event,
        tombstones: Tombstones,
    ) -> None:
        self._worker = worker
        self._bus = bus
        self._engine = engine
        self._pool = pool
        self._out = out
        self._figures = figures
        self._work = work
        self._tombstones = tombstones
        self._jobs: dict[str, Job] = {}
        self._taken: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, request: str) -> Job | None:
        return self._jobs.get(request)

    def note_taken(self, request: str, attempt: int) -> None:
        """The next heartbeat tells routers that this placement has arrived here."""
        self._taken.append((request, attempt))

    def taken(self) -> list[tuple[str, int]]:
        """(request, attempt) of what was taken since the last call."""
        taken, self._taken = self._taken, []
        return taken

    # --- in ------------------------------------------------------------------------------------------

    def take(self, message: Run) -> Job:
        """A job for a `Run`; not in the engine yet.

        Raises:
            RequestError, msgspec.ValidationError: the state contradicts itself.
        """
        state = message.state
        sender = _sender(state)
        sequence = Sequence.from_state(state, time.monotonic(), prefill_only=message.decode is not None)
        sequence.forks = self._wanted(message.forks)
        self.note_taken(state.request, state.attempt)
        return self._register(Job(sequence, sender, len(sequence.tokens), target=message.decode))

    def enter(self, job: Job) -> None:
        """Queues a job's sequence in the engine.

        Raises:
            RequestError: the engine refuses it.
        """
        self._engine.add(job.sequence)
        self._work.set()

    def admit(self, commit: Commit, reservation: Reservation, reply: Committed, began: float) -> None:
        """A received sequence goes on here, and its further choices begin; what their owner has not yet got
        of it is put out at once.

        Raises:
            RequestError, msgspec.ValidationError: the state contradicts itself or is not of the sequence
                that was offered. Nothing has changed then.
        """
        sender = _sender(commit.state)
        now = time.monotonic()
        sequence = self._engine.admit(reservation, commit.state, now)
        sequence.forks = self._wanted(commit.forks)
        timing = sequence.timing
        timing.handoff_ms += (now - began) * 1000
        timing.handoff_bytes += reply.bytes_pulled
        timing.decode_worker = self._worker
        timing.transport = reply.transport
        job = self._register(Job(sequence, sender, len(sequence.tokens), scheduled=True, admitted=now))
        self._take_forks(self._engine.fork(sequence), job)
        self._put_fresh(job)
        self._figures.admitted(timing)
        self._work.set()

    def _register(self, job: Job) -> Job:
        self._jobs[job.request] = job
        return job

    # --- steps ---------------------------------------------------------------------------------------

    async def progressed(self, progress: list[Progress]) -> None:
        """Books a committed step."""
        booked = [(job, step) for step in progress if (job := self._job_of(step)) is not None]
        for job, step in booked:  # before anything else happens: blocks that are copied may be free by now
            if step.first and not job.admitted:
                self._stamp_first(job)
            self._take_forks(step.forked, job)
        for job, step in booked:
            if not job.over:
                if step.failure is not None:
                    await self.fail(job, step.failure)
                else:
                    self._advance(job, step)

    def _job_of(self, step: Progress) -> Job | None:
        job = self._jobs.get(step.seq.request)
        return job if job is not None and job.sequence is step.seq else None

    async def step_failed(self, plan: StepPlan) -> None:
        """Ends the jobs whose step the runner could not execute."""
        failure = Failure(code=Code.INTERNAL, message="a model step failed; the worker's log has the reason")
        for part in plan.slices:
            job = self._jobs.get(part.key[0])
            if job is not None:
                await self.fail(job, failure)

    def _advance(self, job: Job, step: Progress) -> None:
        if step.scores is not None:
            self._out.put(job.reply_to, job.sender.score(packed(step.scores, step.scored_from)))
        if step.new_tokens:
            job.sender.append(step.new_tokens, step.logprobs)
        if step.finish:
            self._finish(job, step.finish)
        elif job.target is not None:  # handed over once its next token is known
            job.held = step.seq.status is Status.HELD
            job.changed.set()
        elif step.new_tokens:
            self._put_fresh(job)

    def _stamp_first(self, job: Job) -> None:
        sequence, now = job.sequence, time.monotonic()
        scheduled = sequence.first_scheduled or now
        queue_ms, prefill_ms = (scheduled - sequence.arrived) * 1000, (now - scheduled) * 1000
        job.timing.queue_ms += queue_ms
        job.timing.prefill_ms += prefill_ms
        job.timing.prefill_worker = self._worker
        job.admitted = now
        self._figures.first_token(queue_ms, prefill_ms, sequence.cached_tokens)

    def _finish(self, job: Job, finish: str) -> None:
        decode_ms = (time.monotonic() - job.admitted) * 1000
        job.timing.decode_ms += decode_ms
        job.timing.decode_worker = job.timing.decode_worker or self._worker
        self._figures.decoded(decode_ms)
        job.sender.finish(finish, timing=job.timing)
        self._put_fresh(job)
        self.forget(job)
        self._out.ended(job.request, job.attempt, job.reply_to, job.sender)

    def _put_fresh(self, job: Job) -> None:
        item = job.sender.fresh()
        item.cached_tokens = job.sequence.cached_tokens
        self._out.put(job.reply_to, item)

    # --- further choices -----------------------------------------------------------------------------

    def rides(self, request: str, attempt: int) -> bool:
        """Whether this is a further choice of a sequence here, and has not begun."""
        return any(
            (fork.request, fork.attempt) == (request, attempt)
            for job in self._jobs.values()
            for fork in job.sequence.forks
        )

    def leave(self, request: str, attempt: int) -> None:
        """A choice of this attempt, or a lower one, that has not begun will not. Idempotent."""
        for job in self._jobs.values():
            forks = job.sequence.forks
            if any(fork.request == request for fork in forks):
                job.sequence.forks = [
                    fork for fork in forks if fork.request != request or fork.attempt > attempt
                ]

    def _wanted(self, forks: list[Fork]) -> list[Fork]:
        """Those that have not been cancelled, or begun otherwise, meanwhile."""
        now, refuses = time.monotonic(), self._tombstones.refuses
        return [
            fork
            for fork in forks
            if fork.request not in self._jobs and not refuses(fork.request, fork.attempt, now)
        ]

    def _take_forks(self, forked: list[Forked], job: Job) -> None:
        for each in forked:
            if each.copy is not None:
                self._pool.copy(*each.copy)
        for each in forked:
            sequence = each.seq
            sender = StreamSender(sequence.request, sequence.attempt)
            if each.failure is not None:
                sender.finish(failure=each.failure)
                self._out.put(sequence.reply_to, sender.fresh())
                continue
            sequence.timing = msgspec.structs.replace(job.timing)
            admitted = time.monotonic()  # what came before is told of its parent
            self._register(Job(sequence, sender, sequence.known, target=job.target, admitted=admitted))
            self._work.set()

    # --- ends ----------------------------------------------------------------------------------------

    def handed_over(self, job: Job) -> None:
        """The receiver owns it: its blocks stay behind here as cache."""
        self.forget(job)
        self._engine.release(job.sequence)
        self._work.set()

    async def fail(self, job: Job, failure: Failure) -> None:
        """Ends a job with a failure, told to its owner. Idempotent."""
        if job.over:
            return
        await self.drop(job, failure.message)
        job.sender.finish(failure=failure)
        self._out.put(job.reply_to, job.sender.fresh())
        for fork in job.sequence.forks:
            sender = StreamSender(fork.request, fork.attempt)
            sender.finish(failure=failure)
            self._out.put(job.reply_to, sender.fresh())
        await self._out.flush()

    async def drop(self, job: Job, reason: str) -> None:
        """Frees all that a job holds here and at its target. Idempotent."""
        if job.over:
            return
        self.forget(job)
        self._engine.abort(job.request, job.sequence.attempt)
        self._work.set()
        if job.task is None or job.task is asyncio.current_task():
            return
        job.task.cancel()
        if job.target is not None:
            gone = Abandon(request=job.request, attempt=job.attempt, reason=reason)
            try:
                await self._bus.publish(job.target.subject, gone)
            except BusDown:
                log.debug("hand-off of %s dropped while the bus was away", job.request)

    async def drop_all_of(self, reply_to: str, reason: str) -> None:
        """Drops every job of one owner."""
        for job in self:
            if job.reply_to == reply_to:
                await self.drop(job, reason)

    def forget(self, job: Job) -> None:
        """It is no longer ours, or never was."""
        job.over = True
        job.changed.set()
        if self._jobs.get(job.request) is job:
            del self._jobs[job.request]


def _sender(state: SequenceState) -> StreamSender:
    """The token stream of a sequence that goes on here, with what former attempts made of it."""
    output = state.known()[max(0, state.prompt_len) :].tolist()
    if state.logprobs and len(state.logprobs) != len(output):
        words = f"{len(output)} output tokens with {len(state.logprobs)} logprobs"
        raise RequestError.of(Code.INVALID_REQUEST, words)
    sender = StreamSender(state.request, state.attempt)
    sender.append(output, state.logprobs)
    sender.delivered(state.delivered)
    return sender
