"""Text on its way to gateways: one message a gateway and round, and notice when a gateway is gone."""

from __future__ import annotations

from collections.abc import Callable

from baton.bus.connection import Bus, BusDown
from baton.protocol.codec import MalformedMessage
from baton.protocol.request import TextBatch, TextDelta
from baton.telemetry.logs import get_logger

log = get_logger(__name__)


class Outbox:
    """Collects deltas by gateway; `flush` sends each gateway one `TextBatch`.

    Batches carry a reply subject that nobody answers: the server's 503 says that the gateway is gone, and
    `gone(subject)` is called once.
    """

    def __init__(self, bus: Bus, *, tokenizer: str, epoch: int, gone: Callable[[str], None]) -> None:
        self._bus = bus
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._gone = gone
        self._waiting: dict[str, list[TextDelta]] = {}
        self._watched: dict[str, str] = {}

    def put(self, subject: str, delta: TextDelta) -> None:
        self._waiting.setdefault(subject, []).append(delta)

    async def flush(self) -> None:
        """Sends what waits. While the bus is away it is kept; after two seconds requests end."""
        waiting, self._waiting = self._waiting, {}
        for subject, deltas in waiting.items():
            try:
                await self._send(subject, deltas)
            except BusDown:
                self._waiting[subject] = deltas + self._waiting.get(subject, [])

    async def _send(self, subject: str, deltas: list[TextDelta]) -> None:
        """One message, or several where one would be larger than the bus takes."""
        batch = TextBatch(tokenizer=self._tokenizer, epoch=self._epoch, deltas=deltas)
        try:
            await self._bus.publish(subject, batch, reply=self._watch(subject))
        except MalformedMessage as error:
            if len(deltas) == 1:
                log.error("text of %s cannot be sent: %s", deltas[0].request, error)
                return
            middle = len(deltas) // 2
            await self._send(subject, deltas[:middle])
            await self._send(subject, deltas[middle:])

    def _watch(self, subject: str) -> str:
        reply = self._watched.get(subject)
        if reply is None:
            reply = self._watched[subject] = self._bus.watch(subject, lambda: self._lost(subject))
        return reply

    def _lost(self, subject: str) -> None:
        if self._watched.pop(subject, None) is not None:
            self._bus.unwatch(subject)
            self._waiting.pop(subject, None)
            self._gone(subject)
