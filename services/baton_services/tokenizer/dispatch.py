"""Getting a live request onto workers: place, run, and again when that fails."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from baton.bus.connection import Bus, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.kvcache.hashing import chain, root_hash
from baton.protocol.base import pack_hashes
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, RequestError
from baton.protocol.liveness import Heartbeat, Role, WorkerInfo
from baton.protocol.placing import Place, Placed, Placement, Target, Unreachable
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Cancel, Run

if TYPE_CHECKING:
    from baton_services.tokenizer.live import LiveRequest

# A `Place` waits in the router's queue; asked again this often, so that a router's death is noticed.
PLACE_ROUND_S = 2.0
RUN_TIMEOUT_S = 0.5
ROUTER_RETRY_S = 0.1
# What one more try elsewhere can mend. Everything else would fail everywhere.
RETRIABLE = {
    Code.WORKER_LOST,
    Code.TRANSFER_FAILED,
    Code.DECODE_FULL,
    Code.DRAINING,
    Code.STALE,
    Code.OVERLOADED,
    Code.FINGERPRINT,
}

_placement_codec = Codec(Placement, Rejected)
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

    async def dispatch(self, live: LiveRequest) -> None:
        """Returns once a worker has accepted the sequence.

        Raises:
            RequestError: the router refused, the deadline passed, or every attempt failed.
            BusDown: the bus is away.
        """
        while not live.over:
            live.begin_attempt()
            started = time.monotonic()
            live.placement = placement = await self._place(live)
            live.timing.place_ms += (time.monotonic() - started) * 1000
            target = placement.prefill or placement.decode
            try:
                await self._run(live, placement, target)
            except (NoResponder, CallTimeout):
                await self.lost(live, target)
            except CallRejected as refusal:
                if refusal.failure.code not in RETRIABLE:
                    raise RequestError(refusal.failure) from refusal
                await self.failed(live, target, refusal)
            else:
                live.heard = time.monotonic()
                return

    async def lost(self, live: LiveRequest, target: Target) -> None:
        """A worker is gone: exclude it here and at the router. Uses up no attempt."""
        self._directory.exclude(target.id, target.epoch)
        live.avoid.append((target.id, target.epoch))
        router = self._router()
        if router is not None:
            await self._bus.publish(router.subject, Unreachable(worker=target.id, epoch=target.epoch))
        await self.withdraw(live, "worker lost")

    async def failed(self, live: LiveRequest, target: Target, cause: CallRejected | RequestError) -> None:
        """An attempt failed of itself: avoid that worker, give up after `max_attempts`.

        Raises:
            RequestError: this was the last attempt.
        """
        live.failures += 1
        if live.failures >= self._max_attempts:
            raise RequestError(cause.failure)
        live.avoid.append((target.id, target.epoch))
        await self.withdraw(live, cause.failure.message)

    async def withdraw(self, live: LiveRequest, reason: str) -> None:
        """Tells every leg and the router that this attempt is over. Idempotent."""
        placement, live.placement = live.placement, None
        if placement is None:
            return
        message = Cancel(request=live.id, attempt=live.attempt, reason=reason)
        for target in filter(None, (placement.prefill, placement.decode)):
            await self._bus.publish(target.subject, message)
        await self.placed(live)

    async def placed(self, live: LiveRequest) -> None:
        """Tells the router that the placement no longer weighs."""
        router = self._router()
        if router is not None:
            await self._bus.publish(router.subject, Placed(request=live.id, attempt=live.attempt))

    def worker_info(self) -> WorkerInfo | None:
        """What the live workers are (the oldest decode worker's word, else any prefill worker's)."""
        beats = [*self._directory.live(Role.DECODE), *self._directory.live(Role.PREFILL)]
        return next((beat.worker for beat in beats if beat.worker is not None), None)

    def _router(self) -> Heartbeat | None:
        routers = self._directory.live(Role.ROUTER)
        return routers[0] if routers else None

    async def _place(self, live: LiveRequest) -> Placement:
        while True:
            now = time.monotonic()
            left = live.remaining_ms(now)
            if left <= 0:
                raise RequestError.of(Code.DEADLINE, "no worker had room before the request's deadline")
            router, query = self._router(), self._query(live, left)
            if router is None or query is None:
                await asyncio.sleep(min(ROUTER_RETRY_S, left / 1000))
                continue
            try:
                reply = await self._bus.call(
                    router.subject, query, _placement_codec, timeout_s=min(PLACE_ROUND_S, left / 1000)
                )
            except NoResponder:
                self._directory.exclude(router.id, router.epoch)
            except CallTimeout:
                continue
            except CallRejected as refusal:
                raise RequestError(refusal.failure) from refusal
            else:
                assert isinstance(reply, Placement)
                return reply

    def _query(self, live: LiveRequest, left_ms: int) -> Place | None:
        info = self.worker_info()
        if info is None:
            return None
        known = live.prompt + live.output
        known_ids = np.asarray(known, dtype=np.uint32)
        hashes = chain(
            root_hash(info.fingerprint, live.generate.cache_salt), known_ids, info.geometry.block_size
        )
        return Place(
            request=live.id,
            attempt=live.attempt,
            fingerprint=info.fingerprint,
            tokens=len(known),
            max_new_tokens=live.sampling.max_tokens - len(live.output),
            hashes=pack_hashes(hashes),
            priority=live.generate.priority,
            deadline_ms=left_ms,
            avoid=live.avoid,
        )

    async def _run(self, live: LiveRequest, placement: Placement, target: Target) -> None:
        handing = placement.decode if placement.prefill is not None else None
        state = live.state(self._tokens_subject, time.monotonic())
        await self._bus.call(
            target.subject, Run(state=state, decode=handing), _accepted_codec, timeout_s=RUN_TIMEOUT_S
        )
