"""Responses that are being streamed: found by their id and ended, whichever gateway streams them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from baton.bus.connection import BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.inbox import Delivery
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.liveness import Heartbeat, Role
from baton.protocol.request import CancelResponse, Rejected, ResponseCancelled
from baton.service.base import ServiceHost
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.responses.items import Json

END_S = 3.0  # for a response to end once it has been told to
ASK_S = 4.0

_codec = Codec(ResponseCancelled, Rejected)


@dataclass(slots=True)
class Live:
    """One response under way. `request` is its sequence's id; `ended` gets the response."""

    request: str
    owner: str
    ended: asyncio.Future[Json]


class LiveResponses:
    """This gateway's, and through the bus those of the others."""

    def __init__(self, host: ServiceHost, exchanges: Exchanges) -> None:
        self._host = host
        self._exchanges = exchanges
        self._live: dict[str, Live] = {}

    @contextmanager
    def follow(self, response: str, request: str, owner: str) -> Iterator[Live]:
        """A response is under way for as long as this lasts."""
        live = Live(request, owner, asyncio.get_running_loop().create_future())
        self._live[response] = live
        try:
            yield live
        finally:
            del self._live[response]
            live.ended.cancel()

    async def cancel(self, response: str, owner: str) -> bytes | None:
        """Ends it; what it has become, as JSON. None: no gateway streams such a response of this owner."""
        body = await self._end(response, owner)
        if body is not None:
            return body
        peers = self._host.directory.live(Role.GATEWAY, ready=False)
        message = CancelResponse(response=response, owner=owner)
        answers = await asyncio.gather(
            *(self._ask(peer, message) for peer in peers if peer.id != self._host.id)
        )
        return next((answer for answer in answers if answer is not None), None)

    async def asked(self, delivery: Delivery) -> None:
        """Another gateway looks for a response."""
        asked: CancelResponse = delivery.message
        body = await self._end(asked.response, asked.owner)
        if body is None:
            await delivery.respond(Rejected(failure=Failure(code=Code.STALE, message="not streamed here")))
        else:
            await delivery.respond(ResponseCancelled(body=body))

    async def _end(self, response: str, owner: str) -> bytes | None:
        live = self._live.get(response)
        if live is None or live.owner != owner:
            return None
        try:
            await self._exchanges.finish(live.request)
            async with asyncio.timeout(END_S):
                return msgspec.json.encode(await asyncio.shield(live.ended))
        except (BusDown, TimeoutError):
            return None
        except asyncio.CancelledError:
            if live.ended.cancelled():  # its client has gone meanwhile
                return None
            raise

    async def _ask(self, peer: Heartbeat, message: CancelResponse) -> bytes | None:
        try:
            answer = await self._host.bus.call(peer.subject, message, _codec, timeout_s=ASK_S)
        except (NoResponder, CallTimeout, CallRejected, BusDown, MalformedMessage):
            return None
        body: bytes = answer.body
        return body
