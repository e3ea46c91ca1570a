"""Asking the router where a live request is to run, and telling it when it no longer does."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.kvcache.hashing import chain, root_hash
from baton.protocol.base import Message, pack_hashes
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, RequestError
from baton.protocol.liveness import Heartbeat, Role, WorkerInfo
from baton.protocol.placing import Place, Placed, Placement, Target
from baton.protocol.request import Rejected
from baton.telemetry.logs import get_logger

if TYPE_CHECKING:
    from baton_services.tokenizer.live import LiveRequest

log = get_logger(__name__)

# A `Place` waits in the router's queue; asked again this often, so that a router's death is noticed.
PLACE_ROUND_S = 2.0
MOVE_PLACE_S = 1.0
ANSWER_S = 0.5  # beyond the time that a router was given
ROUTER_RETRY_S = 0.1

_codec = Codec(Placement, Rejected)


class Placing:
    """The oldest live router, as this tokenizer's requests see it."""

    def __init__(self, bus: Bus, directory: Directory) -> None:
        self._bus = bus
        self._directory = directory
        self._info: WorkerInfo | None = None  # what workers are, as last seen

    async def place(self, live: LiveRequest) -> Placement:
        """Where its current attempt is to run; waits until there is room.

        Raises:
            RequestError: the router refused, the deadline passed, or the request is over.
            BusDown: the bus went away.
        """
        while True:
            now = time.monotonic()
            left = live.remaining_ms(now)
            if live.over:
                raise RequestError.of(Code.CANCELLED, "cancelled")
            if left <= 0:
                raise RequestError.of(Code.DEADLINE, "no worker had room before the request's deadline")
            router, query = self._router(), self._query(live, left)
            if router is None or query is None:
                await asyncio.sleep(min(ROUTER_RETRY_S, left / 1000))
                continue
            try:
                reply = await self._bus.call(
                    router.subject, query, _codec, timeout_s=min(PLACE_ROUND_S, left / 1000)
                )
            except NoResponder:
                self._directory.exclude(router.id, router.epoch)
            except CallTimeout:
                continue
            except CallRejected as refusal:
                if refusal.failure.code is not Code.DRAINING:  # the standby takes over
                    raise RequestError(refusal.failure) from refusal
                await asyncio.sleep(ROUTER_RETRY_S)
            else:
                assert isinstance(reply, Placement)
                return reply

    async def place_elsewhere(self, live: LiveRequest, source: Target) -> Target | None:
        """Where the next attempt could go on with what `source` has of it; None: nowhere, just now."""
        router, query = self._router(), self._query(live, int(MOVE_PLACE_S * 1000))
        if router is None or query is None:
            return None
        query.attempt, query.moving = live.attempt + 1, True
        query.avoid = [*live.avoid, (source.id, source.epoch)]
        try:
            reply = await self._bus.call(router.subject, query, _codec, timeout_s=MOVE_PLACE_S + ANSWER_S)
        except (NoResponder, CallTimeout, CallRejected, BusDown):
            await self.over(live.id, query.attempt)
            return None
        assert isinstance(reply, Placement)
        if reply.decode.id != source.id:
            return reply.decode
        await self.over(live.id, query.attempt)
        return None

    async def over(self, request: str, attempt: int) -> None:
        """Tells the router that a placement no longer weighs, or is no longer asked for."""
        if attempt >= 0:
            await self.tell(Placed(request=request, attempt=attempt))

    async def tell(self, message: Message) -> None:
        """Sends the router what need not arrive."""
        router = self._router()
        if router is not None:
            await self.publish(router.subject, message)

    async def publish(self, subject: str, message: Message) -> None:
        """Sends what need not arrive: whoever misses it finds out otherwise."""
        try:
            await self._bus.publish(subject, message)
        except BusDown:
            log.debug("%s not sent: the bus is away", type(message).__name__)

    def _router(self) -> Heartbeat | None:
        routers = self._directory.live(Role.ROUTER)
        return routers[0] if routers else None

    def _worker_info(self) -> WorkerInfo | None:
        """What workers are (the oldest decode worker's word, else a prefill worker's), or were last."""
        beats = [*self._directory.live(Role.DECODE), *self._directory.live(Role.PREFILL)]
        self._info = next((beat.worker for beat in beats if beat.worker is not None), self._info)
        return self._info

    def _query(self, live: LiveRequest, left_ms: int) -> Place | None:
        info = self._worker_info()
        if info is None:
            return None
        known = live.prompt + live.output
        known_ids = np.asarray(known, dtype=np.uint32)
        hashes = chain(
            root_hash(info.fingerprint, live.generate.cache_salt), known_ids, info.geometry.block_size
        )
        if live.unscored >= 0:  # no cache is read: none should attract it
            hashes = hashes[:0]
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
            choices=1 + len(live.riders),
        )
