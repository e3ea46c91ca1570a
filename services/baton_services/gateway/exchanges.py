"""All live exchanges of a gateway: finding tokenizers for them, feeding them, ending them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.bus.inbox import Inbox
from baton.bus.pace import to_next
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.liveness import Heartbeat, Role
from baton.protocol.placing import Target
from baton.protocol.request import Accepted, CancelRequest, Generate, Inquire, Rejected, TextBatch, TextDelta
from baton.telemetry.logs import get_logger
from baton_services.gateway.exchange import Exchange
from baton_services.gateway.owners import OwnerKey, Owners
from baton_services.gateway.tokenizers import BUS_LOST, TOO_LARGE, Tokenizers

log = get_logger(__name__)

ACCEPT_S = 0.5
SILENCE_S = 3.0
ROUND_S = 0.25
IDLE_ROUND_S = 1.0  # without requests
PAUSE_S = 2.0
EXPECTED_BACK_S = 30.0  # a tokenizer seen this recently may come back, and is waited for
RETRY_S = 0.1

_codec = Codec(Accepted, Rejected)


class Exchanges:
    """Owns every exchange from its `Generate` to its last delta."""

    def __init__(self, bus: Bus, directory: Directory) -> None:
        self._bus = bus
        self._directory = directory
        self._live: dict[str, Exchange] = {}
        self._served: dict[str, float] = {}  # model -> when it could last be asked; monotonic seconds
        self._tokenizers = Tokenizers(bus, directory)
        self.models, self.call = self._tokenizers.models, self._tokenizers.call  # for whoever asks only
        self._owners = Owners(bus, self._owner_lost)
        self._group: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._live)

    def start(self, group: asyncio.TaskGroup, inbox: Inbox) -> None:
        self._group = group
        self._directory.subscribe(self._peer_changed)
        group.create_task(self._feed(inbox))
        group.create_task(self._watch())

    async def open(self, choices: list[Generate], wakes: Sequence[Callable[[], None]]) -> list[Exchange]:
        """Hands the choices of one prompt to a tokenizer, as one message; each of `wakes` is called whenever
        there is something to take of its choice.

        Raises:
            RequestError: no such model, or nobody takes it.
        """
        until = time.monotonic() + choices[0].deadline_ms / 1000
        first, *forks = (
            Exchange(generate, until, wake=wake) for generate, wake in zip(choices, wakes, strict=True)
        )
        first.forks, first.generate.forks = forks, [fork.id for fork in forks]
        opened = first.together
        self._live |= {exchange.id: exchange for exchange in opened}
        try:
            await self._hand(first)
        except BaseException:
            for exchange in opened:
                exchange.over = True
                self._live.pop(exchange.id, None)
            raise
        return opened

    async def close(self, exchange: Exchange, reason: str) -> None:
        """The handler is done with it. Unless it has ended by itself, its owner is told. Idempotent."""
        if self._live.pop(exchange.id, None) is None:
            return
        ended, exchange.over = exchange.over, True
        if not ended and exchange.owner is not None:
            await self._cancel(exchange.id, exchange.owner.subject, reason)

    async def finish(self, request: str) -> None:
        """Has an exchange ended where it is: it goes on to a last delta whose finish is `cancelled`."""
        exchange = self._live.get(request)
        if exchange is not None and exchange.owner is not None and not exchange.over:
            message = CancelRequest(request=request, reason="cancelled", finish=True)
            await self._bus.publish(exchange.owner.subject, message)

    async def _cancel(self, request: str, subject: str, reason: str) -> None:
        try:
            await self._bus.publish(subject, CancelRequest(request=request, reason=reason))
        except BusDown:
            log.debug("request %s ended while the bus was away", request)

    async def _hand(self, exchange: Exchange) -> None:
        """Finds an owner; waits for one while a tokenizer is expected back, up to the deadline.

        Raises:
            RequestError: every tokenizer refused, or none came.
        """
        together = exchange.together
        for each in together:
            each.handing = True
        try:
            await self._find_owner(exchange, self._expected_until(exchange))
        finally:
            for each in together:
                each.handing = False
            exchange.forks, exchange.generate.forks = [], []  # from here on each is sent by itself

    async def _find_owner(self, exchange: Exchange, until: float) -> None:
        refusal: Failure | None = None
        together = exchange.together
        while not exchange.over:
            for beat in self._tokenizers.candidates(exchange.generate.model):
                # From here on its text is taken: it may well come before the answer to this call.
                owner = Target(id=beat.id, epoch=beat.epoch, subject=beat.subject)
                for each in together:
                    each.owner = owner
                exchange.generate.deadline_ms = max(1, int((exchange.deadline - time.monotonic()) * 1000))
                try:
                    await self._bus.call(beat.subject, exchange.generate, _codec, timeout_s=ACCEPT_S)
                except NoResponder:
                    self._exclude(beat, together)
                except CallTimeout:
                    self._exclude(beat, together)
                    await self._cancel_all(together, beat.subject, "given to another tokenizer")
                except asyncio.CancelledError:
                    # The client has gone before the answer to this call: it may well be taken.
                    await self._cancel_all(together, beat.subject, "the client has gone")
                    raise
                except MalformedMessage as error:
                    raise RequestError(TOO_LARGE) from error
                except CallRejected as error:
                    refusal = error.failure
                except BusDown:
                    await self._bus_back()
                    until = max(until, time.monotonic() + ACCEPT_S)  # once more, at least
                else:
                    for each in together:
                        each.heard = time.monotonic()
                    over = [each for each in together if each.over]  # ended from this side meanwhile
                    await self._cancel_all(over, beat.subject, "nobody waits for it")
                    return
                for each in together:
                    each.owner = None
            overloaded = refusal is not None and refusal.code is Code.OVERLOADED
            if overloaded or time.monotonic() >= until:
                raise RequestError(refusal or self._tokenizers.nobody(exchange.generate.model))
            await asyncio.sleep(RETRY_S)

    def _exclude(self, beat: Heartbeat, together: list[Exchange]) -> None:
        """This tokenizer does not answer; another's attempts must come after its own."""
        self._directory.exclude(beat.id, beat.epoch)
        for each in together:
            each.generate.resend += 1

    async def _cancel_all(self, exchanges: list[Exchange], subject: str, reason: str) -> None:
        for exchange in exchanges:
            await self._cancel(exchange.id, subject, reason)

    async def _bus_back(self) -> None:
        """Waits out a pause of the bus.

        Raises:
            RequestError: it lasts for too long.
        """
        try:
            async with asyncio.timeout(PAUSE_S):
                await self._bus.up.wait()
        except TimeoutError as error:
            raise RequestError(BUS_LOST) from error

    def _expected_until(self, exchange: Exchange) -> float:
        """Until when a tokenizer is waited for: not at all, if none was here just now."""
        served = self._served.get(exchange.generate.model, -EXPECTED_BACK_S)
        return min(exchange.deadline, served + EXPECTED_BACK_S)

    async def _feed(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            batch: TextBatch = delivery.message
            sender = (batch.tokenizer, batch.epoch)
            self._owners.heard(*sender)
            for delta in batch.deltas:
                exchange = self._live.get(delta.request)
                owner = None if exchange is None else exchange.owner
                if exchange is None or (owner is not None and (owner.id, owner.epoch) != sender):
                    await self._disown(batch, delta)
                elif delta.failure is not None and delta.failure.code is Code.DRAINING:
                    self._spawn(self._begin_again(exchange))  # its tokenizer stops; another one goes on
                else:
                    exchange.put(delta)

    async def _disown(self, batch: TextBatch, delta: TextDelta) -> None:
        """Text that nobody waits for, of a request given up: its sender may stop, if it has not ended."""
        if not delta.finish and delta.failure is None:
            beat = self._directory.get(batch.tokenizer)
            if beat is not None and beat.epoch == batch.epoch:
                await self._cancel(delta.request, beat.subject, "nobody waits for it")

    async def _watch(self) -> None:
        """Silent owners, a bus that is gone, deadlines."""
        while True:
            await asyncio.sleep(ROUND_S if self._live else to_next(IDLE_ROUND_S))
            now, away = time.monotonic(), self._bus.down_since
            self._served |= dict.fromkeys(self._tokenizers.models(), now)
            if away is None:
                await self._owners.look(self._owned())
            for exchange in list(self._live.values()):
                if exchange.over:
                    continue
                if away is not None and now - away > PAUSE_S:
                    exchange.fail(BUS_LOST)
                elif now >= exchange.deadline:
                    exchange.fail(_DEADLINE)
                elif away is None and (exchange.gap or now - exchange.heard > SILENCE_S):
                    self._spawn(self._ask(exchange))

    def _owned(self) -> dict[OwnerKey, tuple[Target, str]]:
        """Every tokenizer that owns something, and one request that it should have."""
        settled = [exchange for exchange in self._live.values() if not (exchange.over or exchange.handing)]
        pairs = [(exchange.owner, exchange.id) for exchange in settled]
        return {(owner.id, owner.epoch): (owner, request) for owner, request in pairs if owner is not None}

    async def _ask(self, exchange: Exchange) -> None:
        """Makes sure that the owner still has it; begins again elsewhere if not, or if text is missing."""
        exchange.heard = time.monotonic()
        owner = exchange.owner
        if owner is None:
            return
        try:
            await self._bus.call(owner.subject, Inquire(request=exchange.id), _codec, timeout_s=ACCEPT_S)
        except (NoResponder, CallTimeout, CallRejected):
            await self._begin_again(exchange)
        except BusDown:
            return
        else:
            if exchange.gap:
                await self._cancel(exchange.id, owner.subject, "text was lost on the way")
                await self._begin_again(exchange)

    async def _begin_again(self, exchange: Exchange) -> None:
        if exchange.handing or exchange.over:
            return
        exchange.owner, exchange.gap = None, False
        exchange.generate.resend += 1
        try:
            await self._hand(exchange)
        except RequestError as error:
            exchange.fail(error.failure)

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if beat.role is not Role.TOKENIZER:
            return
        if kind != "left":
            self._owners.heard(beat.id, beat.epoch)
            return
        self._owners.left(beat.id, beat.epoch)
        self._owner_lost(Target(id=beat.id, epoch=beat.epoch, subject=beat.subject))

    def _owner_lost(self, gone: Target) -> None:
        self._directory.exclude(gone.id, gone.epoch)
        for exchange in list(self._live.values()):
            owner = exchange.owner
            if owner is not None and (owner.id, owner.epoch) == (gone.id, gone.epoch):
                self._spawn(self._begin_again(exchange))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._group is not None
        self._group.create_task(work)


_DEADLINE = Failure(code=Code.DEADLINE, message="the request took longer than request_timeout_s allows")
