"""Keeping a live request on workers: its first run, replays when one fails it, moves when one drains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from baton.bus.connection import BusDown
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.placing import Target
from baton.telemetry.logs import get_logger
from baton_services.tokenizer.dispatch import Dispatcher
from baton_services.tokenizer.live import LiveRequest

log = get_logger(__name__)

INTERNAL = Failure(code=Code.INTERNAL, message="the tokenizer failed on this request; its log has the reason")
BUS_LOST = Failure(code=Code.BUS_LOST, message="the message bus went away; please send the request again")

Step = Callable[[LiveRequest], Awaitable[bool]]


class Replays:
    """One thing at a time happens to a request: while it is being placed or moved, news of it wait.

    What came in the meantime (a failure, a lost worker) has withdrawn its placement, so it is placed again.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        end: Callable[[LiveRequest, Failure], Awaitable[None]],
    ) -> None:
        self._dispatcher = dispatcher
        self._spawn = spawn
        self._end = end

    async def run(self, live: LiveRequest) -> None:
        """Returns when a worker has accepted the request, or it is over."""
        if live.dispatching:
            return
        if live.over:
            self._let_go(live)
            return
        live.dispatching = True
        try:
            while live.placement is None and not live.over:
                await self._guard(live, self._dispatcher.dispatch(live))
            if live.over:
                await self._dispatcher.withdraw(live, "over before it ran")
        finally:
            live.dispatching = False
            self._let_go(live)

    def _let_go(self, live: LiveRequest) -> None:
        """Its further choices are on their own now; one that does not run yet is placed by itself."""
        riders, live.riders = live.riders, []
        for rider in riders:
            rider.dispatching = False
            if rider.placement is None:
                self._spawn(self.run(rider))

    async def failed(self, live: LiveRequest, worker: str, failure: Failure) -> None:
        """A worker of the current attempt says that it failed."""
        culprit = self._dispatcher.culprit(live, worker, failure.code)
        if culprit is None:
            return  # the last word of a leg that no longer matters
        log.warning("request %s: %s: %s", live.id, worker, failure.message)
        await self._guard(live, self._dispatcher.failed(live, culprit, failure))
        self._spawn(self.run(live))

    def lost(self, live: LiveRequest, leg: Target) -> None:
        """A worker that it depends on is gone."""
        self._spawn(self._lost(live, leg))

    async def _lost(self, live: LiveRequest, leg: Target) -> None:
        if live.over or leg.epoch not in [other.epoch for other in live.legs()]:
            return
        log.warning("request %s: worker %s is gone at token %d", live.id, leg.id, len(live.output))
        await self._guard(live, self._dispatcher.lost(live, leg, at_work=leg == live.at_work))
        await self.run(live)

    async def forgotten(self, live: LiveRequest) -> None:
        """Its workers live, but do not know it."""
        if live.over or live.dispatching or live.placement is None:
            return
        log.warning("request %s: its workers do not know it, at token %d", live.id, len(live.output))
        await self._guard(live, self._dispatcher.forgotten(live))
        await self.run(live)

    def leaving(self, live: LiveRequest, worker: str, epoch: int) -> None:
        """Its worker drains: it can be moved, if that worker alone has it."""
        if not (live.over or live.dispatching) and [(leg.id, leg.epoch) for leg in live.legs()] == [
            (worker, epoch)
        ]:
            self._spawn(self._move(live))

    async def _move(self, live: LiveRequest) -> None:
        if live.dispatching or live.over or len(live.legs()) != 1:
            return
        live.dispatching = True
        try:
            await self._guard(live, self._dispatcher.move(live))
        finally:
            live.dispatching = False
        if live.placement is None:
            await self.run(live)

    async def _guard(self, live: LiveRequest, work: Awaitable[object]) -> None:
        """Does one step for a request; what goes wrong ends the request, and nothing else."""
        try:
            await work
        except RequestError as error:
            await self._end(live, error.failure)
        except BusDown:
            await self._end(live, BUS_LOST)
        except Exception:
            log.exception("could not place request %s", live.id)
            await self._end(live, INTERNAL)
