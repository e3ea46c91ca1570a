"""The sending side of a hand-off: offer, name finished blocks, commit. The receiver pulls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.deadlines import remaining_ms
from baton.kvcache.handoff import Announcement, HandoffError, Outgoing
from baton.kvcache.pool import KvPool, checksum
from baton.protocol.base import pack_tokens
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Abandon, BlockRef, Commit, Committed, Granted, Offer, Ready, Refused
from baton.protocol.placing import Target
from baton.protocol.request import Rejected
from baton.telemetry.logs import get_logger
from baton.worker.figures import WorkerFigures
from baton.worker.identity import WorkerIdentity
from baton.worker.inbound import Spawn
from baton.worker.job import Job

log = get_logger(__name__)

OFFER_TIMEOUT_S = 0.5
OFFER_ROUNDS = 3  # who is dead is known sooner: by a 503, or by silent heartbeats
COMMIT_ROUND_S = 1.0
REFUSALS = (Code.DECODE_FULL, Code.FINGERPRINT, Code.DRAINING)

_offer_codec = Codec(Granted, Refused, Rejected)
_commit_codec = Codec(Committed, Refused, Rejected)


@dataclass(slots=True, eq=False)
class Sending:
    """One hand-off on its way out."""

    job: Job
    target: Target
    handoff: Outgoing
    preemptions: int  # the sequence's, when this began: once there are more, the blocks named are gone
    heard: float  # when the receiver last gave a sign of life; monotonic seconds


class Outbound:
    """Hands sequences over, each in a task of its own that drives an `Outgoing`.

    The engine pins the blocks: the sequence is running or HELD until `done` (the receiver owns it) or
    `failed` (its owner is told, and asks for another placement). Every way out is in `_hand_over`, but for
    a cancelled task: whoever cancels it frees the sequence and tells the receiver.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        bus: Bus,
        pool: KvPool,
        figures: WorkerFigures,
        spawn: Spawn,
        *,
        lease_ms: int,
        done: Callable[[Job], None],
        failed: Callable[[Job, Failure], Awaitable[None]],
    ) -> None:
        self._identity = identity
        self._bus = bus
        self._pool = pool
        self._figures = figures
        self._spawn = spawn
        self._lease_ms = lease_ms
        self._done = done
        self._failed = failed
        self._open: dict[str, Sending] = {}

    def __len__(self) -> int:
        return len(self._open)

    def sends(self, job: Job) -> bool:
        """Whether it is being handed over."""
        sending = self._open.get(job.request)
        return sending is not None and sending.job is job

    def begin(self, job: Job, group: asyncio.TaskGroup) -> None:
        """Starts handing `job` over to its target."""
        assert job.target is not None
        now = time.monotonic()
        blocks = job.known_at_start // self._pool.geometry.block_size
        handoff = Outgoing(job.request, job.attempt, blocks, self._lease_ms, now)
        sending = Sending(job, job.target, handoff, job.sequence.preemptions, now)
        self._open[job.request] = sending
        job.task = group.create_task(self._hand_over(sending))
        job.task.add_done_callback(lambda _: self._close(sending))

    def withdraw_preempted(self) -> None:
        """Calls off the hand-offs of pre-empted sequences; each begins anew once it is scheduled again."""
        for sending in list(self._open.values()):
            job = sending.job
            if job.sequence.preemptions > sending.preemptions and not job.over and job.task is not None:
                self._close(sending)
                job.task.cancel()
                job.task, job.scheduled = None, False
                self._spawn(self._abandon(sending, "pre-empted"))

    def renewed(self, request: str, attempt: int) -> None:
        """The receiver is still pulling."""
        sending = self._open.get(request)
        if sending is not None and sending.job.attempt == attempt:
            sending.heard = time.monotonic()
            sending.handoff.renewed(sending.heard)

    def _close(self, sending: Sending) -> None:
        if self._open.get(sending.job.request) is sending:
            del self._open[sending.job.request]

    async def _hand_over(self, sending: Sending) -> None:
        job, handoff = sending.job, sending.handoff
        try:
            await self._offer(sending)
            await self._send(sending)
            if job.over:  # it ended with its first token: nothing to hand over
                await self._abandon(sending, "ended here")
                return
            await self._commit(sending)
        except RequestError as error:
            failure = error.failure
        except (HandoffError, MalformedMessage) as error:
            failure = Failure(code=Code.TRANSFER_FAILED, message=str(error))
        except BusDown:
            words = "the message bus went away during a hand-off"
            failure = Failure(code=Code.TRANSFER_FAILED, message=words)
        else:
            self._figures.handoff("committed")
            self._done(job)
            return
        handoff.abandoned(failure.message)
        self._figures.handoff("refused" if failure.code in REFUSALS else "failed")
        await self._failed(job, failure)
        await self._abandon(sending, handoff.reason)

    async def _offer(self, sending: Sending) -> None:
        me, job, now = self._identity, sending.job, time.monotonic()
        sequence = job.sequence
        offer = Offer(
            request=job.request,
            attempt=job.attempt,
            sender=me.id,
            epoch=me.epoch,
            subject=me.subject,
            address=me.address,
            secret=me.secret,
            fingerprint=me.fingerprint,
            tokens=pack_tokens(sequence.tokens[: job.known_at_start]),
            salt=sequence.salt,
            priority=sequence.priority,
            max_new_tokens=sequence.max_len - job.known_at_start,
            deadline_ms=remaining_ms(sequence.deadline, now),
        )
        sending.handoff.offer_sent(now)
        for _ in range(OFFER_ROUNDS):  # a repeated offer is granted again
            reply = await self._call(sending.target, offer, _offer_codec, OFFER_TIMEOUT_S)
            if isinstance(reply, Granted):
                granted = sending.handoff.granted(reply.hit_blocks, time.monotonic())
                await self._announce(sending, granted)
                return
        raise RequestError.of(Code.WORKER_LOST, f"worker {sending.target.id} did not answer")

    async def _send(self, sending: Sending) -> None:
        """Names full blocks as they are finished, until the next token is known."""
        job, handoff = sending.job, sending.handoff
        size = self._pool.geometry.block_size
        named = handoff.hit_blocks  # the receiver holds those; no need to sum them up
        handoff.blocks_ready(0, [BlockRef(0, 0, 0)] * named, time.monotonic())
        while True:
            job.changed.clear()
            full = min(job.sequence.computed, job.known_at_start) // size
            if full > named and not job.over:
                refs = [self._ref(slot) for slot in job.sequence.blocks[named:full]]
                await self._announce(sending, handoff.blocks_ready(named, refs, time.monotonic()))
                named = full
            if job.held or job.over:
                return
            await job.changed.wait()

    async def _announce(self, sending: Sending, news: Announcement | None) -> None:
        if news is None:
            return
        message = Ready(
            request=sending.job.request,
            attempt=sending.job.attempt,
            epoch=self._identity.epoch,
            first=news.first,
            blocks=news.refs,
        )
        await self._bus.publish(sending.target.subject, message)

    async def _commit(self, sending: Sending) -> None:
        job, sequence = sending.job, sending.job.sequence
        full, rest = divmod(sequence.computed, self._pool.geometry.block_size)
        state = msgspec.structs.replace(
            sequence.to_state(time.monotonic()), attempt=job.attempt, delivered=job.sender.sent
        )
        commit = Commit(
            request=job.request,
            attempt=job.attempt,
            epoch=self._identity.epoch,
            state=state,
            partial=self._ref(sequence.blocks[full]) if rest else None,
            forks=sequence.forks,
        )
        sending.heard = time.monotonic()
        while time.monotonic() - sending.heard < self._lease_ms / 1000:
            sending.handoff.commit_sent(time.monotonic())
            if await self._call(sending.target, commit, _commit_codec, COMMIT_ROUND_S) is not None:
                sending.handoff.committed()
                return
        raise RequestError.of(Code.TRANSFER_FAILED, f"{sending.target.id} did not take the KV blocks in time")

    async def _call(
        self, target: Target, message: Offer | Commit, codec: Codec, timeout_s: float
    ) -> Granted | Committed | None:
        """A call; None when no answer came in time.

        Raises:
            RequestError: the receiver refused, or is gone.
        """
        try:
            reply = await self._bus.call(target.subject, message, codec, timeout_s=timeout_s)
        except NoResponder as error:
            raise RequestError.of(Code.WORKER_LOST, f"worker {target.id} is gone") from error
        except CallRejected as error:
            raise RequestError(error.failure) from error
        except CallTimeout:
            return None
        if isinstance(reply, Refused):
            raise RequestError(reply.failure)
        assert isinstance(reply, Granted | Committed)
        return reply

    async def _abandon(self, sending: Sending, reason: str) -> None:
        message = Abandon(request=sending.job.request, attempt=sending.job.attempt, reason=reason)
        try:
            await self._bus.publish(sending.target.subject, message)
        except BusDown:
            log.debug("hand-off of %s ended while the bus was away", sending.job.request)

    def _ref(self, slot: int) -> BlockRef:
        return BlockRef(slot, int(self._pool.generations[slot]), checksum(self._pool.view(slot)))
