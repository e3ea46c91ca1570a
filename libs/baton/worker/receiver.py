"""Doing one hand-off at its receiver: pull what is named, verify it, admit the sequence or free the room."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from baton.bus.connection import Bus, BusDown
from baton.engine.engine import Engine
from baton.kvcache.transports import Puller, PullError, PullStats
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Abandon, BlockRef, Committed, Refused, Renew
from baton.telemetry.logs import get_logger
from baton.worker.figures import WorkerFigures
from baton.worker.jobs import Jobs
from baton.worker.prepare import Prepare, prepared
from baton.worker.receipt import Receipt
from baton.worker.token_out import TokenOut

log = get_logger(__name__)

RENEW_LOOK_S = 1.0


class Receiver:
    """Runs each `Receipt` to its end, in a task of its own."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        puller: Puller,
        figures: WorkerFigures,
        jobs: Jobs,
        out: TokenOut,
        prepare: Prepare,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._puller = puller
        self._figures = figures
        self._jobs = jobs
        self._out = out
        self._prepare = prepare

    async def run(self, receipt: Receipt) -> Committed | None:
        """Pulls what is named until the commit, then admits. Every way out frees what was not admitted."""
        handoff, done = receipt.handoff, None
        while not (handoff.over or handoff.complete):
            await self._advance(receipt)
        if handoff.complete and receipt.commit is not None:
            await prepared(self._prepare(receipt.commit.state.sampling))
        if handoff.complete:
            done = self._admit(receipt)
        if handoff.take_release():
            self._engine.cancel_reservation(receipt.reservation)
        return done

    async def answer(self, receipt: Receipt, done: Committed | None) -> None:
        """Tells the sender the outcome, as the answer to its commit if that is here."""
        if done is not None:
            await self._out.flush()
            if receipt.reply is not None:
                await receipt.reply.respond(done)
            return
        offer, reason = receipt.offer, receipt.handoff.reason
        level = logging.DEBUG if receipt.unwanted else logging.WARNING
        log.log(level, "hand-off of %s from %s failed: %s", offer.request, offer.sender, reason)
        if receipt.reply is not None:
            failure = Failure(code=Code.TRANSFER_FAILED, message=reason)
            await receipt.reply.respond(Refused(failure=failure))
            return
        gone = Abandon(request=offer.request, attempt=offer.attempt, reason=reason)
        try:
            await self._bus.publish(offer.subject, gone)
        except BusDown:
            log.debug("hand-off of %s ended while the bus was away", offer.request)

    async def _advance(self, receipt: Receipt) -> None:
        """Pulls what is wanted, or waits for something to happen."""
        if receipt.wanted:
            refs, receipt.wanted = receipt.wanted, {}
            await self._pull(receipt, refs)
            return
        receipt.changed.clear()
        lease = receipt.handoff.next_deadline
        if lease is None:
            return
        now = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(lease, receipt.deadline) - now)):
                await receipt.changed.wait()
        except TimeoutError:
            now = time.monotonic()
            receipt.handoff.lease_expired(now)
            if now >= receipt.deadline:
                receipt.end("the request's deadline passed")

    async def _pull(self, receipt: Receipt, refs: dict[int, BlockRef]) -> None:
        """Pulls blocks by index; keeps the sender's lease alive meanwhile."""
        offer, handoff, indices = receipt.offer, receipt.handoff, sorted(refs)
        if not handoff.pull_started(indices):
            return
        blocks, slots = [refs[index] for index in indices], receipt.slots(indices)
        pull = asyncio.ensure_future(
            self._puller.pull(offer.address, offer.secret, offer.epoch, blocks, slots)
        )
        receipt.pull = pull
        while not (await asyncio.wait({pull}, timeout=RENEW_LOOK_S))[0]:
            if handoff.renew_due(time.monotonic()):
                await self._renew(receipt)
        receipt.pull = None
        if pull.cancelled():
            handoff.pull_failed(indices, "given up")
        elif (error := pull.exception()) is None:
            handoff.pull_done(indices, time.monotonic())
            self._book(receipt, pull.result(), len(indices))
        elif isinstance(error, PullError | OSError):
            handoff.pull_failed(indices, f"pull from {offer.sender}: {error}")
        else:
            log.error("pull from %s", offer.sender, exc_info=error)
            handoff.pull_failed(indices, f"pull from {offer.sender}: {type(error).__name__}")

    async def _renew(self, receipt: Receipt) -> None:
        offer = receipt.offer
        try:
            await self._bus.publish(offer.subject, Renew(request=offer.request, attempt=offer.attempt))
        except BusDown:
            log.debug("lease of %s not renewed: the bus is away", offer.request)

    def _book(self, receipt: Receipt, stats: PullStats, blocks: int) -> None:
        receipt.bytes += stats.bytes
        receipt.seconds += stats.seconds
        receipt.transport = stats.transport
        self._figures.pulled(stats, blocks)

    def _admit(self, receipt: Receipt) -> Committed | None:
        commit = receipt.commit
        assert commit is not None
        reply = Committed(
            request=commit.request,
            attempt=commit.attempt,
            bytes_pulled=receipt.bytes,
            pull_ms=receipt.seconds * 1000,
            transport=receipt.transport or "none",
        )
        try:
            self._jobs.admit(commit, receipt.reservation, reply, receipt.committed_at)
        except (RequestError, msgspec.ValidationError) as error:
            receipt.handoff.abandoned(str(error))
            return None
        receipt.handoff.admitted()
        return reply
