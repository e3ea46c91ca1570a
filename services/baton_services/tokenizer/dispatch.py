"""Getting a live request onto workers, and again when that fails."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.placing import Placement, Target, Unreachable
from baton.protocol.request import Accepted, Rejected
from baton.protocol.sequence import Fork
from baton.protocol.work import Cancel, Ended, Move, Run
from baton_services.tokenizer.placing import Placing

if TYPE_CHECKING:
    from baton_services.tokenizer.live import LiveRequest

RUN_TIMEOUT_S = 0.5
PAUSE_S = 2.0  # a bus away for longer ends what is live
BACKOFF_S = 0.05  # from the second setback in a row on, doubled each time
BACKOFF_MOST_S = 1.0
PROGRESS = 32  # new tokens that clear a request of that
LOSSES = 8  # workers that may die at work on one request, before it is taken for what kills them
LOSSES_IN_ALL = 32  # with those that were not at work on it yet, or any more
AVOIDED = 32

# What one more try elsewhere can mend. Everything else would fail everywhere.
NOBODYS_FAULT = {Code.WORKER_LOST, Code.DECODE_FULL, Code.DRAINING, Code.STALE, Code.OVERLOADED}
COUNTED = {Code.TRANSFER_FAILED, Code.FINGERPRINT, Code.INTERNAL}
# What a prefill worker says of the decode worker that it hands over to.
OF_THE_RECEIVER = {Code.WORKER_LOST, Code.DECODE_FULL, Code.TRANSFER_FAILED, Code.FINGERPRINT}

_accepted_codec = Codec(Accepted, Rejected)


class Dispatcher:
    """Places a request and hands it to the first worker of its placement.

    Every try raises `attempt`: whatever a former one still sends is then stale. The caller owns the
    request; nothing here ends it except by raising.
    """

    def __init__(self, bus: Bus, directory: Directory, *, tokens_subject: str, max_attempts: int) -> None:
        self._bus = bus
        self._directory = directory
        self._tokens_subject = tokens_subject
        self._max_attempts = max_attempts
        self._placing = Placing(bus, directory)

    async def dispatch(self, live: LiveRequest) -> None:
        """Returns once a worker has accepted the sequence, or the request is over.

        Raises:
            RequestError: the router refused, the deadline passed, or every attempt failed.
            BusDown: the bus is away for longer than a pause.
        """
        while not live.over:
            try:
                if await self._try(live):
                    return
            except BusDown:
                await self.withdraw(live, "the bus went away")
                await self._bus_back()

    async def _try(self, live: LiveRequest) -> bool:
        """One attempt; whether it runs."""
        if live.setbacks > 1:
            await asyncio.sleep(min(BACKOFF_MOST_S, BACKOFF_S * 2 ** min(live.setbacks - 2, 10)))
        live.begin_attempt()
        started = time.monotonic()
        live.placement = placement = await self._placing.place(live)
        live.timing.place_ms += (time.monotonic() - started) * 1000
        target = placement.prefill or placement.decode
        if live.over:
            return True
        riders = live.board()
        for each in (live, *riders):
            each.heard = each.progressed = time.monotonic()
        try:
            await self._run(live, riders, placement, target)
        except (NoResponder, CallTimeout) as error:
            await self._disembark(riders)
            await self.lost(live, target, at_work=isinstance(error, CallTimeout))
        except CallRejected as refusal:
            await self._disembark(riders)
            await self.failed(live, target, refusal.failure)
        live.heard = live.progressed = time.monotonic()
        return live.placement is placement  # not if it failed, perhaps even before it was accepted

    async def _disembark(self, riders: list[LiveRequest]) -> None:
        """The run that these were to go along with has not begun, as far as is known."""
        for rider in riders:
            await self.withdraw(rider, "the run did not begin")

    async def lost(self, live: LiveRequest, target: Target, *, at_work: bool) -> None:
        """A worker is gone: exclude it here and at the router. Uses up no attempt.

        `at_work`: it was computing this very request, which may be what killed it.

        Raises:
            RequestError: too many have died under this request.
        """
        self._directory.exclude(target.id, target.epoch)
        await self._placing.tell(Unreachable(worker=target.id, epoch=target.epoch))
        words = f"worker {target.id} was lost"
        if len(live.output) >= live.lost_at + PROGRESS:  # it has been at work since: it is no such request
            live.losses = live.losses_at_work = 0
        live.lost_at = len(live.output)
        live.losses += 1
        live.losses_at_work += at_work
        if live.losses_at_work > LOSSES or live.losses > LOSSES_IN_ALL:
            others = f"{live.losses - 1} others that this request was on"
            raise RequestError.of(Code.WORKER_LOST, f"{words}, as were {others}")
        await self._again(live, words, target)

    async def failed(self, live: LiveRequest, target: Target, failure: Failure) -> None:
        """An attempt failed: avoid that worker; what is the request's own fault, give up in the end.

        Raises:
            RequestError: no other try would help, or this was the last one.
        """
        if failure.code in COUNTED:
            live.failures += 1
        hopeless = failure.code not in COUNTED | NOBODYS_FAULT
        if hopeless or live.failures >= self._max_attempts:
            raise RequestError(failure)
        if failure.code is Code.WORKER_LOST:
            await self.lost(live, target, at_work=target == live.at_work)
        elif failure.code is Code.TRANSFER_FAILED:  # the way between the two may be what is broken
            await self._again(live, failure.message, *live.legs())
        else:
            await self._again(live, failure.message, target)

    def culprit(self, live: LiveRequest, worker: str, code: Code) -> Target | None:
        """Which leg of the current attempt a failure told by `worker` is about; None: no matter any more."""
        placement = live.placement
        if placement is None:
            return None
        teller = next((leg for leg in live.legs() if leg.id == worker), None)
        about_the_other = teller is placement.prefill and code in OF_THE_RECEIVER
        return placement.decode if teller is not None and about_the_other else teller

    async def forgotten(self, live: LiveRequest) -> None:
        """Its workers live, but know nothing of it: a message was lost on the way."""
        live.setbacks += 1
        await self.withdraw(live, "lost on the way")

    async def _again(self, live: LiveRequest, reason: str, *avoid: Target) -> None:
        live.setbacks += 1
        live.avoid = [*live.avoid, *((leg.id, leg.epoch) for leg in avoid)][-AVOIDED:]
        await self.withdraw(live, reason)

    async def withdraw(self, live: LiveRequest, reason: str) -> None:
        """Tells every leg and the router that this attempt is over. Idempotent."""
        placement, live.placement = live.placement, None
        if placement is not None:
            message = Cancel(request=live.id, attempt=live.attempt, reason=reason)
            for target in filter(None, (placement.prefill, placement.decode)):
                await self._placing.publish(target.subject, message)
        await self._placing.over(live.id, live.attempt)

    async def ended(self, live: LiveRequest) -> None:
        """The last token is here: its worker may forget the stream, the router the placement."""
        for leg in live.legs():
            await self._placing.publish(leg.subject, Ended(request=live.id, attempt=live.attempt))
        await self._placing.over(live.id, live.attempt)

    async def move(self, live: LiveRequest) -> bool:
        """Has a sequence moved off its draining worker. False: nothing was done.

        Raises:
            RequestError, BusDown: as `dispatch`; the attempt is withdrawn, and the request to be replayed.
        """
        (source,), attempt = live.legs(), live.attempt
        target = await self._placing.place_elsewhere(live, source)
        if target is None:
            return False
        if live.over or live.attempt != attempt or live.placement is None:
            await self._placing.over(live.id, attempt + 1)
            return False
        live.begin_attempt()
        live.placement = Placement(prefill=source, decode=target)  # either may hold it now
        order = Move(
            request=live.id, attempt=attempt, successor=live.attempt, target=target, start=len(live.output)
        )
        await self._placing.over(live.id, attempt)
        try:
            await self._bus.call(source.subject, order, _accepted_codec, timeout_s=RUN_TIMEOUT_S)
        except (NoResponder, CallTimeout, CallRejected, BusDown) as error:
            await self.withdraw(live, f"could not be moved: {error}")
        live.heard = live.progressed = time.monotonic()
        return True

    async def _bus_back(self) -> None:
        """Waits out a pause.

        Raises:
            BusDown: it lasts for too long.
        """
        try:
            async with asyncio.timeout(PAUSE_S):
                await self._bus.up.wait()
        except TimeoutError as error:
            raise BusDown("the bus is away") from error

    async def _run(
        self, live: LiveRequest, riders: list[LiveRequest], placement: Placement, target: Target
    ) -> None:
        handing = placement.decode if placement.prefill is not None else None
        state = live.state(self._tokens_subject, time.monotonic())
        forks = [Fork(rider.id, rider.attempt, rider.generate.choice) for rider in riders]
        run = Run(state=state, decode=handing, forks=forks)
        await self._bus.call(target.subject, run, _accepted_codec, timeout_s=RUN_TIMEOUT_S)
