"""Text to tokens and back for who asks only for that: no request comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.bus.connection import BusDown
from baton.bus.inbox import Delivery
from baton.protocol.base import pack_tokens, unpack_tokens
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.request import Decode, Decoded, Encode, Encoded, Rejected
from baton.telemetry.logs import get_logger
from baton_services.tokenizer.prepare import Preparer

log = get_logger(__name__)

AT_ONCE = 64


class Conversions:
    """Answers `Encode` and `Decode`, each in a task of its own, so that a long text delays no request."""

    def __init__(
        self, preparer: Preparer, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        self._preparer = preparer
        self._spawn = spawn
        self._running = 0

    async def take(self, delivery: Delivery) -> None:
        if self._running >= AT_ONCE:
            words = "too many texts are being converted; try again later"
            failure = Failure(code=Code.OVERLOADED, message=words, retry_after_ms=1_000)
            await delivery.respond(Rejected(failure=failure))
            return
        self._running += 1
        self._spawn(self._answer(delivery))

    async def _answer(self, delivery: Delivery) -> None:
        try:
            await delivery.respond(await self._convert(delivery.message))
        except BusDown:
            log.debug("a conversion was done while the bus was away")
        finally:
            self._running -= 1

    async def _convert(self, message: Encode | Decode) -> Encoded | Decoded | Rejected:
        try:
            if isinstance(message, Decode):
                return Decoded(text=await self._preparer.decode(unpack_tokens(message.tokens).tolist()))
            tokens = await self._preparer.encode(message.generate)
            return Encoded(tokens=pack_tokens(tokens), max_context=self._preparer.max_context)
        except RequestError as error:
            return Rejected(failure=error.failure)
        except Exception:
            log.exception("could not convert")
            words = "the tokenizer failed on this text; its log has the reason"
            return Rejected(failure=Failure(code=Code.INTERNAL, message=words))
