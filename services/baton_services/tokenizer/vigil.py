"""Keeping watch over live requests: deadlines, silent workers, no progress, a bus that is gone."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.bus.pace import to_next
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, Failure
from baton.protocol.placing import Target
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Resume
from baton_services.tokenizer.live import LiveRequest
from baton_services.tokenizer.outbox import Outbox
from baton_services.tokenizer.replays import BUS_LOST

ROUND_S = 0.25
IDLE_ROUND_S = 1.0  # without requests
PAUSE_S = 2.0  # a bus away for longer ends what is live
PROBE_S = 0.6  # a worker from which nothing at all has come for so long is asked whether it lives
DEAF_S = 2.5  # and one that does not answer either, after so long, is lost
RETURN_S = 1.5  # everybody is back on a bus that has returned
SILENCE_S = 3.0  # a request of which nothing has come for so long is asked for
ASK_TIMEOUT_S = 0.5
ASK_AT_ONCE = 64
STALL_S = 30.0  # no new token for so long, and for what is queued ahead of it, is a failure
SLOW_TOKENS_S = 25  # a slow worker still reads so many prompt tokens in a second

_codec = Codec(Accepted, Rejected)

WorkerKey = tuple[str, int]  # id, epoch


class Answer(enum.Enum):
    HELD = enum.auto()  # it has the request, and sends its tokens again from where we are
    UNKNOWN = enum.auto()
    GONE = enum.auto()
    SILENT = enum.auto()


class Outcomes(Protocol):
    """What is done about what was found."""

    def lost(self, live: LiveRequest, leg: Target) -> None: ...
    async def forgotten(self, live: LiveRequest) -> None: ...
    async def failed(self, live: LiveRequest, worker: str, failure: Failure) -> None: ...


class Vigil:
    """Looks at every live request four times a second; a request never waits for what cannot come."""

    def __init__(
        self,
        live: dict[str, LiveRequest],
        bus: Bus,
        directory: Directory,
        outcomes: Outcomes,
        *,
        end: Callable[[LiveRequest, Failure], Awaitable[None]],
    ) -> None:
        self._live = live
        self._bus = bus
        self._directory = directory
        self._outcomes = outcomes
        self._end = end
        self._heard: dict[WorkerKey, float] = {}  # the last sign of life of each worker
        bus.on_change(self._bus_changed)

    def heard(self, worker: str, epoch: int) -> None:
        """Anything came from this worker."""
        self._heard[worker, epoch] = time.monotonic()

    def left(self, worker: str, epoch: int) -> None:
        self._heard.pop((worker, epoch), None)

    def _bus_changed(self, up: bool) -> None:
        """It was our own connection that was silent; and the workers may still be on their way back."""
        if up:
            now = time.monotonic()
            self._heard = dict.fromkeys(self._heard, now + RETURN_S)
            for live in self._live.values():  # what came of it meanwhile may be lost: ask soon
                live.heard = now + RETURN_S - SILENCE_S

    async def run(self, outbox: Outbox) -> None:
        while True:
            await asyncio.sleep(ROUND_S if self._live else to_next(IDLE_ROUND_S))
            if self._live:
                await self._round(time.monotonic())
            await outbox.flush()

    async def _round(self, now: float) -> None:
        away = self._bus.down_since
        for live in list(self._live.values()):
            if away is not None and now - away > PAUSE_S:
                await self._end(live, BUS_LOST)
            elif now >= live.deadline:
                await self._end(live, _DEADLINE)
        if away is None:
            await self._probe_workers(now)
            await self._ask_for_silent(now)
            await self._end_stalls(now)

    def _placed(self) -> list[LiveRequest]:
        return [live for live in self._live.values() if live.placement is not None and not live.dispatching]

    async def _probe_workers(self, now: float) -> None:
        """One call to each worker that has gone silent: a dead one is known at once, for all its requests."""
        suspects: dict[WorkerKey, tuple[Target, list[LiveRequest]]] = {}
        for live in self._placed():
            for leg in live.legs():
                key = (leg.id, leg.epoch)
                if now - self._heard.setdefault(key, now) > PROBE_S:
                    suspects.setdefault(key, (leg, []))[1].append(live)
        await asyncio.gather(*(self._probe(leg, lives) for leg, lives in suspects.values()))

    async def _probe(self, leg: Target, lives: list[LiveRequest]) -> None:
        answer = await self._ask(lives[0], leg)
        key, now = (leg.id, leg.epoch), time.monotonic()
        if answer is Answer.GONE or (answer is Answer.SILENT and now - self._heard.get(key, now) > DEAF_S):
            for live in lives:
                self._outcomes.lost(live, leg)
        elif answer is not Answer.SILENT:
            self._heard[key] = now

    async def _ask_for_silent(self, now: float) -> None:
        silent = [live for live in self._placed() if now - live.heard > SILENCE_S]
        for start in range(0, len(silent), ASK_AT_ONCE):
            await asyncio.gather(*(self._check(live, now) for live in silent[start : start + ASK_AT_ONCE]))

    async def _check(self, live: LiveRequest, now: float) -> None:
        live.heard, placement = now, live.placement
        answers = [await self._ask(live, leg) for leg in live.legs()]
        if live.placement is placement and all(answer is Answer.UNKNOWN for answer in answers):
            await self._outcomes.forgotten(live)

    async def _ask(self, live: LiveRequest, leg: Target) -> Answer:
        """Whether that worker still has the request; it then sends its tokens again from where we are."""
        resume = Resume(
            request=live.id, attempt=live.attempt, start=len(live.output), prompt_start=live.unscored
        )
        try:
            await self._bus.call(leg.subject, resume, _codec, timeout_s=ASK_TIMEOUT_S)
        except NoResponder:
            return Answer.GONE
        except CallRejected:
            return Answer.UNKNOWN
        except (CallTimeout, BusDown):
            return Answer.SILENT
        return Answer.HELD

    async def _end_stalls(self, now: float) -> None:
        for live in self._placed():
            if now - live.progressed > self._patience_s(live):
                words = f"no new token for {now - live.progressed:.0f} s"
                stalled = Failure(code=Code.TRANSFER_FAILED, message=words)
                await self._outcomes.failed(live, live.legs()[0].id, stalled)

    def _patience_s(self, live: LiveRequest) -> float:
        """How long its next token may take, given what its workers have to read before."""
        ahead = 0
        for leg in live.legs():
            beat = self._directory.get(leg.id)
            ahead += beat.load.waiting_tokens if beat is not None and beat.load is not None else 0
        unread = len(live.prompt) if not live.output else 0
        return STALL_S + (ahead + unread) / SLOW_TOKENS_S


_DEADLINE = Failure(
    code=Code.DEADLINE, message="the request's deadline passed before its answer was complete"
)
