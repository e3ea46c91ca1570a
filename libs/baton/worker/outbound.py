"""The sending side of a hand-off: offer, name finished blocks, commit. The receiver pulls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.deadlines import remaining_ms
from baton.kvcache.handoff import Announcement, HandoffError, Outgoing
from baton.kvcache.pool import KvPool, checksum
from baton.protocol.base import pack_tokens
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Abandon, BlockRef, Commit, Committed, Granted, Offer, Ready, Refused
from baton.protocol.placing import Target
from baton.protocol.request import Rejected
from baton.worker.figures import WorkerFigures
from baton.worker.identity import WorkerIdentity
from baton.worker.job import Job

OFFER_TIMEOUT_S = 0.5
COMMIT_ROUND_S = 1.0

_offer_codec = Codec(Granted, Refused, Rejected)
_commit_codec = Codec(Committed, Refused, Rejected)


class Outbound:
    """Hands sequences over, each in a task of its own that drives an `Outgoing`.

    The engine pins the blocks: the sequence is running or HELD until `done` (the receiver owns it) or
    `failed` (its owner is told, and asks for another placement). Every way out is in `_hand_over`.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        bus: Bus,
        pool: KvPool,
        figures: WorkerFigures,
        *,
        lease_ms: int,
        done: Callable[[Job], None],
        failed: Callable[[Job, Failure], Awaitable[None]],
    ) -> None:
        self._identity = identity
        self._bus = bus
        self._pool = pool
        self._figures = figures
        self._lease_ms = lease_ms
        self._done = done
        self._failed = failed
        self._open: dict[tuple[str, int], Outgoing] = {}
        self._heard: dict[tuple[str, int], float] = {}  # the receiver's last sign of life

    def begin(self, job: Job, group: asyncio.TaskGroup) -> None:
        """Starts handing `job` over to its target."""
        assert job.target is not None
        job.task = group.create_task(self._hand_over(job, job.target))

    def renewed(self, request: str, attempt: int) -> None:
        """The receiver is still pulling."""
        handoff = self._open.get((request, attempt))
        if handoff is not None:
            handoff.renewed(time.monotonic())
            self._heard[request, attempt] = time.monotonic()

    async def _hand_over(self, job: Job, target: Target) -> None:
        blocks = job.known_at_start // self._pool.geometry.block_size
        handoff = Outgoing(job.request, job.attempt, blocks, self._lease_ms, time.monotonic())
        self._open[job.request, job.attempt] = handoff
        try:
            await self._offer(job, target, handoff)
            await self._send(job, target, handoff)
            if job.over:  # it ended with its first token: nothing to hand over
                handoff.abandoned("ended at prefill")
            else:
                await self._commit(job, target, handoff)
        except RequestError as error:
            await self._end(job, handoff, error.failure)
        except HandoffError as error:
            await self._end(job, handoff, Failure(code=Code.TRANSFER_FAILED, message=str(error)))
        except BusDown:
            words = "the message bus went away during a hand-off"
            await self._end(job, handoff, Failure(code=Code.TRANSFER_FAILED, message=words))
        else:
            if not job.over:
                self._figures.handoff("committed")
                self._done(job)
                return
        finally:
            del self._open[job.request, job.attempt]
            self._heard.pop((job.request, job.attempt), None)
        await self._abandon(job, target, handoff.reason)

    async def _end(self, job: Job, handoff: Outgoing, failure: Failure) -> None:
        handoff.abandoned(failure.message)
        refused = failure.code in (Code.DECODE_FULL, Code.FINGERPRINT, Code.DRAINING)
        self._figures.handoff("refused" if refused else "failed")
        await self._failed(job, failure)

    async def _offer(self, job: Job, target: Target, handoff: Outgoing) -> None:
        me, sequence, now = self._identity, job.sequence, time.monotonic()
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
            max_new_tokens=sequence.sampling.max_tokens,
            deadline_ms=remaining_ms(sequence.deadline, now),
        )
        handoff.offer_sent(now)
        reply = await self._call(target, offer, _offer_codec, OFFER_TIMEOUT_S)
        if reply is None:
            raise RequestError.of(Code.WORKER_LOST, f"worker {target.id} did not answer")
        assert isinstance(reply, Granted)
        await self._announce(target, handoff, handoff.granted(reply.hit_blocks, time.monotonic()))

    async def _send(self, job: Job, target: Target, handoff: Outgoing) -> None:
        """Names full blocks as they are finished, until the first token is known."""
        size = self._pool.geometry.block_size
        named = handoff.hit_blocks  # the receiver holds those; no need to sum them up
        handoff.blocks_ready(0, [BlockRef(0, 0, 0)] * named, time.monotonic())
        while True:
            full = min(job.sequence.computed, job.known_at_start) // size
            if full > named:
                refs = [self._ref(slot) for slot in job.sequence.blocks[named:full]]
                await self._announce(target, handoff, handoff.blocks_ready(named, refs, time.monotonic()))
                named = full
            if job.held or job.over:
                return
            await job.changed.wait()
            job.changed.clear()

    async def _announce(self, target: Target, handoff: Outgoing, news: Announcement | None) -> None:
        if news is None:
            return
        message = Ready(
            request=handoff.request,
            attempt=handoff.attempt,
            epoch=self._identity.epoch,
            first=news.first,
            blocks=news.refs,
        )
        await self._bus.publish(target.subject, message)

    async def _commit(self, job: Job, target: Target, handoff: Outgoing) -> None:
        sequence = job.sequence
        full, rest = divmod(sequence.computed, self._pool.geometry.block_size)
        commit = Commit(
            request=job.request,
            attempt=job.attempt,
            epoch=self._identity.epoch,
            state=sequence.to_state(time.monotonic()),
            partial=self._ref(sequence.blocks[full]) if rest else None,
        )
        key = (job.request, job.attempt)
        self._heard[key] = time.monotonic()
        while time.monotonic() - self._heard[key] < self._lease_ms / 1000:
            handoff.commit_sent(time.monotonic())
            if await self._call(target, commit, _commit_codec, COMMIT_ROUND_S) is not None:
                handoff.committed()
                return
        raise RequestError.of(Code.TRANSFER_FAILED, f"{target.id} did not take the KV blocks in time")

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

    async def _abandon(self, job: Job, target: Target, reason: str) -> None:
        message = Abandon(request=job.request, attempt=job.attempt, reason=reason)
        try:
            await self._bus.publish(target.subject, message)
        except BusDown:
            return  # the receiver's own lease ends it

    def _ref(self, slot: int) -> BlockRef:
        return BlockRef(slot, int(self._pool.generations[slot]), checksum(self._pool.view(slot)))
