"""Keeping watch over live requests: deadlines, silent workers, a bus that is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, Failure
from baton.protocol.placing import Target
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Resume
from baton_services.tokenizer.live import LiveRequest
from baton_services.tokenizer.outbox import Outbox

ROUND_S = 0.25
SILENCE_S = 3.0  # three heartbeats
PAUSE_S = 2.0  # a bus away for longer ends what is live
ASK_TIMEOUT_S = 0.5
ASK_AT_ONCE = 64

_codec = Codec(Accepted, Rejected)


class Vigil:
    """Looks at every live request four times a second; a request never waits for what cannot come."""

    def __init__(
        self,
        live: dict[str, LiveRequest],
        bus: Bus,
        directory: Directory,
        *,
        lost: Callable[[LiveRequest, str, int], None],
        end: Callable[[LiveRequest, Failure], Awaitable[None]],
    ) -> None:
        self._live = live
        self._bus = bus
        self._directory = directory
        self._lost = lost
        self._end = end

    async def run(self, outbox: Outbox) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            if not self._live:
                continue
            await self._round(time.monotonic())
            await outbox.flush()

    async def _round(self, now: float) -> None:
        away = self._bus.down_since
        silent = []
        for live in list(self._live.values()):
            if away is not None and now - away > PAUSE_S:
                await self._end(live, _BUS_LOST)
            elif now >= live.deadline:
                await self._end(live, _DEADLINE)
            elif away is None and self._silent(live, now):
                silent.append(live)
        for start in range(0, len(silent), ASK_AT_ONCE):
            await asyncio.gather(*(self._check(live, now) for live in silent[start : start + ASK_AT_ONCE]))

    def _silent(self, live: LiveRequest, now: float) -> bool:
        placed = live.placement is not None and not live.dispatching
        return placed and now - live.heard > SILENCE_S

    async def _check(self, live: LiveRequest, now: float) -> None:
        live.heard = now
        legs = live.legs()
        answers = [await self._ask(live, leg) for leg in legs]
        if live.placement is not None and not any(answers):
            self._lost(live, legs[-1].id, legs[-1].epoch)

    async def _ask(self, live: LiveRequest, leg: Target) -> bool:
        """Whether that worker still has the request; it then sends its tokens again from where we are."""
        resume = Resume(request=live.id, attempt=live.attempt, start=len(live.output))
        try:
            await self._bus.call(leg.subject, resume, _codec, timeout_s=ASK_TIMEOUT_S)
        except (NoResponder, CallTimeout, CallRejected):
            return False
        except BusDown:
            return True
        return True


_DEADLINE = Failure(
    code=Code.DEADLINE, message="the request's deadline passed before its answer was complete"
)
_BUS_LOST = Failure(code=Code.BUS_LOST, message="the message bus went away; please send the request again")
