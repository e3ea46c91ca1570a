"""The receiving side of a hand-off: reserve, pull and verify, admit on commit."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.bus.connection import Bus, BusDown
from baton.bus.inbox import Delivery
from baton.bus.tombstones import Tombstones
from baton.engine.engine import Engine
from baton.engine.reservations import Reservation
from baton.kvcache.handoff import HandoffError
from baton.kvcache.incoming import Incoming
from baton.kvcache.transports import Puller, PullError
from baton.protocol.base import unpack_tokens
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import (
    Abandon,
    BlockRef,
    Commit,
    Committed,
    Granted,
    Offer,
    Ready,
    Refused,
    Renew,
)
from baton.telemetry.logs import get_logger
from baton.worker.figures import WorkerFigures
from baton.worker.jobs import Jobs
from baton.worker.token_out import TokenOut

log = get_logger(__name__)

RENEW_LOOK_S = 1.0
KEEP_COMMITTED = 1_024


@dataclass(slots=True, eq=False)
class Receipt:
    """One hand-off on its way in: the state machine, the reserved slots, and what was moved."""

    offer: Offer
    reservation: Reservation
    handoff: Incoming
    wanted: dict[int, BlockRef] = field(default_factory=dict)  # named, not pulled yet
    commit: Commit | None = None
    reply: Delivery | None = None
    committed_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    bytes: int = 0
    seconds: float = 0.0
    transport: str = ""

    def slots(self, indices: list[int]) -> list[int]:
        return [self.reservation.slots[index - self.reservation.hit_blocks] for index in indices]


class Inbound:
    """Takes hand-offs: each offer reserves room at once or is refused; nobody waits while holding."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        puller: Puller,
        tombstones: Tombstones,
        figures: WorkerFigures,
        jobs: Jobs,
        out: TokenOut,
        *,
        lease_ms: int,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._puller = puller
        self._tombstones = tombstones
        self._figures = figures
        self._jobs = jobs
        self._out = out
        self._lease_ms = lease_ms
        self._open: dict[str, Receipt] = {}
        self._done: OrderedDict[tuple[str, int], Committed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def knows(self, request: str, attempt: int) -> bool:
        receipt = self._open.get(request)
        return receipt is not None and receipt.offer.attempt == attempt

    # --- messages ------------------------------------------------------------------------------------

    async def offered(self, delivery: Delivery, group: asyncio.TaskGroup, *, draining: bool) -> None:
        """Answers an `Offer` at once: `Granted` with room reserved, or `Refused`."""
        offer: Offer = delivery.message
        known = self._open.get(offer.request)
        if known is not None and known.offer.attempt == offer.attempt:
            await delivery.respond(Granted(hit_blocks=known.reservation.hit_blocks))
            return
        try:
            self._check(offer, known, draining=draining)
            receipt = self._reserve(offer)
        except RequestError as error:
            await delivery.respond(Refused(failure=error.failure))
            return
        if known is not None:
            self.drop(offer.request, known.offer.attempt)
        self._open[offer.request] = receipt
        receipt.task = group.create_task(self._receive(receipt))
        await delivery.respond(Granted(hit_blocks=receipt.reservation.hit_blocks))

    def ready(self, message: Ready) -> None:
        """More of the sender's blocks are finished."""
        receipt = self._current(message.request, message.attempt)
        if receipt is None:
            return
        try:
            receipt.wanted |= receipt.handoff.ready(
                message.epoch, message.first, message.blocks, time.monotonic()
            )
        except HandoffError as error:
            receipt.handoff.abandoned(str(error))
        receipt.changed.set()

    async def committed(self, delivery: Delivery) -> None:
        """The sequence is ours once its blocks are; answered when they are. Repeats are harmless."""
        commit: Commit = delivery.message
        again = self._done.get((commit.request, commit.attempt))
        receipt = self._current(commit.request, commit.attempt)
        if again is not None:
            await delivery.respond(again)
        elif receipt is None or commit.epoch != receipt.offer.epoch:
            stale = Failure(code=Code.STALE, message="this hand-off is not known here")
            await delivery.respond(Refused(failure=stale))
        else:
            now = time.monotonic()
            receipt.reply, receipt.commit = delivery, commit
            receipt.committed_at = receipt.committed_at or now
            full = commit.state.computed // self._engine.pool.block_size
            try:
                receipt.wanted |= receipt.handoff.commit(commit.epoch, full, commit.partial, now)
            except HandoffError as error:
                receipt.handoff.abandoned(str(error))
            receipt.changed.set()

    def drop(self, request: str, attempt: int) -> None:
        """Ends a hand-off of `attempt` or lower; its reservation is freed once no pull writes to it."""
        receipt = self._open.get(request)
        if receipt is not None and receipt.offer.attempt <= attempt and receipt.task is not None:
            receipt.task.cancel()

    def peer_left(self, worker: str, epoch: int) -> None:
        """A sender is gone: nothing more will come from it."""
        for receipt in list(self._open.values()):
            if (receipt.offer.sender, receipt.offer.epoch) == (worker, epoch):
                receipt.handoff.peer_lost()
                receipt.changed.set()

    def _check(self, offer: Offer, known: Receipt | None, *, draining: bool) -> None:
        mine = self._engine.config.fingerprint
        if offer.fingerprint != mine:
            words = f"{offer.sender} computes with {offer.fingerprint}, this worker with {mine}"
            raise RequestError.of(Code.FINGERPRINT, words)
        if draining:
            raise RequestError.of(Code.DRAINING, "this worker is draining")
        stale = known is not None and known.offer.attempt > offer.attempt
        if stale or self._tombstones.refuses(offer.request, offer.attempt, time.monotonic()):
            raise RequestError.of(Code.STALE, "this attempt was cancelled")

    def _reserve(self, offer: Offer) -> Receipt:
        tokens = unpack_tokens(offer.tokens).tolist()
        key = (offer.request, offer.attempt, 0)
        made = self._engine.reserve(key, tokens, offer.salt, offer.max_new_tokens, offer.priority)
        if made is None:
            raise RequestError.of(Code.DECODE_FULL, "this worker has no room for the KV blocks")
        full = len(tokens) // self._engine.pool.block_size
        now = time.monotonic()
        handoff = Incoming(
            offer.request, offer.attempt, offer.epoch, full, made.hit_blocks, self._lease_ms, now
        )
        return Receipt(offer, made, handoff)

    def _current(self, request: str, attempt: int) -> Receipt | None:
        receipt = self._open.get(request)
        return receipt if receipt is not None and receipt.offer.attempt == attempt else None

    # --- one hand-off --------------------------------------------------------------------------------

    async def _receive(self, receipt: Receipt) -> None:
        """Pulls what is named until the commit, then admits. Every way out frees what was not admitted."""
        handoff = receipt.handoff
        try:
            while not (handoff.over or handoff.complete):
                await self._advance(receipt)
            if handoff.complete:
                await self._admit(receipt)
        except RequestError as error:
            handoff.abandoned(error.failure.message)
        except BusDown:
            handoff.abandoned("the message bus went away")
        finally:
            handoff.abandoned("cancelled")  # nothing, if it is over
            if handoff.take_release():
                self._engine.cancel_reservation(receipt.reservation)
            if self._open.get(receipt.offer.request) is receipt:
                del self._open[receipt.offer.request]
        if receipt.handoff.reason:
            await self._refuse(receipt)

    async def _advance(self, receipt: Receipt) -> None:
        """Pulls what is wanted, or waits for something to happen."""
        handoff = receipt.handoff
        if receipt.wanted:
            refs, receipt.wanted = receipt.wanted, {}
            await self._pull(receipt, refs)
            return
        receipt.changed.clear()
        deadline = handoff.next_deadline
        if deadline is None or handoff.complete:
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await receipt.changed.wait()
        except TimeoutError:
            handoff.lease_expired(time.monotonic())

    async def _pull(self, receipt: Receipt, refs: dict[int, BlockRef]) -> None:
        """Pulls blocks by index; keeps the sender's lease alive meanwhile."""
        offer, handoff, indices = receipt.offer, receipt.handoff, sorted(refs)
        if not handoff.pull_started(indices):
            return
        pull = asyncio.ensure_future(
            self._puller.pull(
                offer.address,
                offer.secret,
                offer.epoch,
                [refs[index] for index in indices],
                receipt.slots(indices),
            )
        )
        try:
            while not (await asyncio.wait({pull}, timeout=RENEW_LOOK_S))[0]:
                if handoff.renew_due(time.monotonic()):
                    await self._bus.publish(
                        offer.subject, Renew(request=offer.request, attempt=offer.attempt)
                    )
            stats = pull.result()
        except PullError as error:
            handoff.pull_failed(indices, f"pull from {offer.sender}: {error}")
            return
        except BaseException as error:
            pull.cancel()  # a copy in a thread cannot be stopped: the slots stay ours until it has ended
            await asyncio.wait({pull})
            handoff.pull_failed(indices, repr(error))
            raise
        handoff.pull_done(indices, time.monotonic())
        receipt.bytes += stats.bytes
        receipt.seconds += stats.seconds
        receipt.transport = stats.transport
        self._figures.pulled(stats, len(indices))

    async def _admit(self, receipt: Receipt) -> None:
        commit = receipt.commit
        assert commit is not None
        reply = Committed(
            request=commit.request,
            attempt=commit.attempt,
            bytes_pulled=receipt.bytes,
            pull_ms=receipt.seconds * 1000,
            transport=receipt.transport or "none",
        )
        self._jobs.admit(receipt.offer, commit.state, receipt.reservation, reply, receipt.committed_at)
        receipt.handoff.admitted()
        self._done[commit.request, commit.attempt] = reply
        if len(self._done) > KEEP_COMMITTED:
            self._done.popitem(last=False)
        if receipt.reply is not None:
            await receipt.reply.respond(reply)
        await self._out.flush()

    async def _refuse(self, receipt: Receipt) -> None:
        """Tells the sender, as the answer to its commit if that is here."""
        offer, reason = receipt.offer, receipt.handoff.reason
        log.warning("hand-off of %s from %s failed: %s", offer.request, offer.sender, reason)
        failure = Failure(code=Code.TRANSFER_FAILED, message=reason)
        if receipt.reply is not None:
            await receipt.reply.respond(Refused(failure=failure))
            return
        try:
            await self._bus.publish(
                offer.subject, Abandon(request=offer.request, attempt=offer.attempt, reason=reason)
            )
        except BusDown:
            return  # its lease ends it
