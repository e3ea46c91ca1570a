"""The receiving side of hand-offs: what peers say about them, and who may send one."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from baton.bus.inbox import Delivery
from baton.engine.engine import Engine
from baton.kvcache.handoff import HandoffError
from baton.kvcache.incoming import Incoming
from baton.protocol.base import unpack_tokens
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.handoff import Commit, Committed, Granted, Offer, Ready, Refused
from baton.worker.jobs import Jobs
from baton.worker.receipt import Receipt
from baton.worker.receiver import Receiver

KEEP_COMMITTED = 1_024
PARKED_LIMIT = 256
UNKNOWN_S = 1.5  # by then a sender's heartbeat has come


class Spawn(Protocol):
    """Runs a coroutine as a task that the worker owns."""

    def __call__(self, work: Coroutine[Any, Any, None], /) -> object: ...


class Inbound:
    """Takes hand-offs: each offer reserves room at once or is refused; nobody waits while holding.

    A `Receipt` holds the reserved slots until its task has admitted the sequence or freed them.
    """

    def __init__(
        self, engine: Engine, jobs: Jobs, receiver: Receiver, spawn: Spawn, *, lease_ms: int
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._receiver = receiver
        self._spawn = spawn
        self._lease_ms = lease_ms
        self._open: dict[str, Receipt] = {}  # the newest attempt of each request
        self._parked: list[Delivery] = []  # offers that a lower class makes room for once its step is done
        self._ending = 0  # receipts that were given up and still wait for their last pull
        self._done: OrderedDict[tuple[str, int], Committed] = OrderedDict()

    def __len__(self) -> int:
        """Hand-offs that hold room here."""
        return len(self._open) + self._ending

    def attempt(self, request: str) -> int:
        """The attempt of this request that is being received; -1: none is."""
        receipt = self._open.get(request)
        return -1 if receipt is None else receipt.offer.attempt

    async def offered(self, delivery: Delivery) -> None:
        """Answers an `Offer` at once: `Granted` with room reserved, or `Refused`.

        One that a lower class can make room for is answered after the step that runs: see `parked`.
        """
        offer: Offer = delivery.message
        known = self._open.get(offer.request)
        if known is not None and known.offer.attempt == offer.attempt:
            await delivery.respond(Granted(hit_blocks=known.reservation.hit_blocks))
            return
        try:
            receipt = self._reserve(offer)
        except RequestError as error:
            full = error.failure.code is Code.DECODE_FULL
            if full and len(self._parked) < PARKED_LIMIT and self._engine.yields(offer.priority):
                self._parked.append(delivery)
            else:
                await delivery.respond(Refused(failure=error.failure))
            return
        self._open[offer.request] = receipt
        self._jobs.note_taken(offer.request, offer.attempt)
        self._spawn(self._receive(receipt))
        await delivery.respond(Granted(hit_blocks=receipt.reservation.hit_blocks))

    def parked(self) -> list[Delivery]:
        """Takes the offers that wait for the end of a step, to be looked at again."""
        taken, self._parked = self._parked, []
        return taken

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
            receipt.end(str(error))
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
            self._commit(receipt, delivery, commit)

    def _commit(self, receipt: Receipt, delivery: Delivery, commit: Commit) -> None:
        now = time.monotonic()
        receipt.reply, receipt.commit = delivery, commit
        receipt.committed_at = receipt.committed_at or now
        computed = commit.state.computed
        full, rest = divmod(computed, self._engine.pool.block_size)
        try:
            if computed != len(receipt.reservation.tokens) or bool(rest) != (commit.partial is not None):
                raise HandoffError(f"commit of {computed} tokens' KV is not what was offered")
            receipt.wanted |= receipt.handoff.commit(commit.epoch, full, commit.partial, now)
        except HandoffError as error:
            receipt.end(str(error))
        receipt.changed.set()

    def drop(self, request: str, attempt: int, reason: str) -> None:
        """Ends a hand-off of `attempt` or lower. Idempotent."""
        receipt = self._open.get(request)
        if receipt is not None and receipt.offer.attempt <= attempt:
            self._end(receipt, reason)

    def drop_all(self, reason: str) -> None:
        """Ends every hand-off."""
        for receipt in list(self._open.values()):
            self._end(receipt, reason)

    def check_senders(self, alive: Callable[[str, int], bool]) -> None:
        """Ends the hand-offs of senders that should have been heard of by now, but are not `alive`.

        One that dies as it joins may never have been known, so its leaving is not told either.
        """
        now = time.monotonic()
        for receipt in list(self._open.values()):
            offer = receipt.offer
            if now - receipt.since > UNKNOWN_S and not alive(offer.sender, offer.epoch):
                self._end(receipt, "the sender is gone")

    def peer_left(self, worker: str, epoch: int) -> None:
        """A sender is gone: nothing more will come from it."""
        for receipt in list(self._open.values()):
            if (receipt.offer.sender, receipt.offer.epoch) == (worker, epoch):
                self._end(receipt, "the sender is gone")

    def _end(self, receipt: Receipt, reason: str) -> None:
        receipt.unwanted = True
        receipt.end(reason)
        del self._open[receipt.offer.request]
        self._ending += 1

    def _reserve(self, offer: Offer) -> Receipt:
        tokens = unpack_tokens(offer.tokens).tolist()
        mine = self._engine.config.fingerprint
        if offer.fingerprint != mine:
            words = f"{offer.sender} computes with {offer.fingerprint}, this worker with {mine}"
            raise RequestError.of(Code.FINGERPRINT, words)
        key = (offer.request, offer.attempt, 0)
        made = self._engine.reserve(key, tokens, offer.salt, offer.max_new_tokens, offer.priority)
        if made is None:
            raise RequestError.of(Code.DECODE_FULL, "this worker has no room for the KV blocks")
        full = len(tokens) // self._engine.pool.block_size
        now = time.monotonic()
        handoff = Incoming(
            offer.request, offer.attempt, offer.epoch, full, made.hit_blocks, self._lease_ms, now
        )
        return Receipt(offer, made, handoff, now, now + offer.deadline_ms / 1000)

    def _current(self, request: str, attempt: int) -> Receipt | None:
        receipt = self._open.get(request)
        return receipt if receipt is not None and receipt.offer.attempt == attempt else None

    async def _receive(self, receipt: Receipt) -> None:
        done = await self._receiver.run(receipt)
        if self._open.get(receipt.offer.request) is receipt:
            del self._open[receipt.offer.request]
        else:
            self._ending -= 1
        if done is not None:
            self._done[done.request, done.attempt] = done
            if len(self._done) > KEEP_COMMITTED:
                self._done.popitem(last=False)
        await self._receiver.answer(receipt, done)
