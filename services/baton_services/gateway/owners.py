"""Whether the tokenizers that own requests are alive, found out sooner than their heartbeats would tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.protocol.codec import Codec
from baton.protocol.placing import Target
from baton.protocol.request import Accepted, Inquire, Rejected

PROBE_S = 0.8  # a tokenizer from which nothing has come for so long is asked whether it lives
DEAF_S = 2.5  # and one that does not answer either, after so long, is lost
ASK_S = 0.5
RETURN_S = 1.5  # everybody is back on a bus that has returned

_codec = Codec(Accepted, Rejected)

OwnerKey = tuple[str, int]  # id, epoch


class Owners:
    """One call to each owner that has gone silent; `lost` is told of those that are gone."""

    def __init__(self, bus: Bus, lost: Callable[[Target], None]) -> None:
        self._bus = bus
        self._lost = lost
        self._heard: dict[OwnerKey, float] = {}
        bus.on_change(self._bus_changed)

    def heard(self, owner: str, epoch: int) -> None:
        """Anything came from this tokenizer."""
        self._heard[owner, epoch] = time.monotonic()

    def left(self, owner: str, epoch: int) -> None:
        self._heard.pop((owner, epoch), None)

    def _bus_changed(self, up: bool) -> None:
        if up:
            self._heard = dict.fromkeys(self._heard, time.monotonic() + RETURN_S)

    async def look(self, owned: dict[OwnerKey, tuple[Target, str]]) -> None:
        """Asks the silent ones. `owned`: each owner, and one request that it should have."""
        now = time.monotonic()
        silent = [
            self._ask(owner, request)
            for key, (owner, request) in owned.items()
            if now - self._heard.setdefault(key, now) > PROBE_S
        ]
        await asyncio.gather(*silent)

    async def _ask(self, owner: Target, request: str) -> None:
        key = (owner.id, owner.epoch)
        try:
            await self._bus.call(owner.subject, Inquire(request=request), _codec, timeout_s=ASK_S)
        except NoResponder:
            self._lost(owner)
        except CallTimeout:
            if time.monotonic() - self._heard.get(key, 0.0) > DEAF_S:
                self._lost(owner)
        except BusDown:
            return
        except CallRejected:  # it lives, though it does not have this one
            self.heard(*key)
        else:
            self.heard(*key)
