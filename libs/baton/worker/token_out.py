"""Tokens on their way to tokenizers: one message a step and tokenizer, kept until acknowledged."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable

from baton.bus.connection import Bus, BusDown
from baton.bus.streams import StreamSender
from baton.protocol.base import Message
from baton.protocol.codec import MalformedMessage
from baton.protocol.work import Leaving, TokenBatch, Tokens
from baton.telemetry.logs import get_logger

log = get_logger(__name__)

KEEP_ENDED_S = 60.0
KEEP_ENDED = 4_096


class TokenOut:
    """Collects items by tokenizer; `flush` sends each tokenizer one `TokenBatch`.

    Ended streams are kept for `Resume` until `Ended` comes, 60 s pass, or 4,096 newer ones have ended.
    Batches carry a reply subject that nobody answers: on the server's 503 `gone(reply_to)` is called.
    """

    def __init__(self, bus: Bus, *, worker: str, epoch: int, gone: Callable[[str], None]) -> None:
        self._bus = bus
        self._worker = worker
        self._epoch = epoch
        self._gone = gone
        self._waiting: dict[str, list[Tokens]] = {}
        self._watched: dict[str, str] = {}
        self._ended: OrderedDict[tuple[str, int], tuple[float, str, StreamSender]] = OrderedDict()

    def put(self, reply_to: str, item: Tokens) -> None:
        self._waiting.setdefault(reply_to, []).append(item)

    def ended(self, request: str, attempt: int, reply_to: str, sender: StreamSender) -> None:
        """Keeps a finished stream until it is acknowledged."""
        self._ended[request, attempt] = (time.monotonic() + KEEP_ENDED_S, reply_to, sender)
        while len(self._ended) > KEEP_ENDED:
            self._ended.popitem(last=False)

    def acknowledged(self, request: str, attempt: int) -> None:
        self._ended.pop((request, attempt), None)

    def resume(self, request: str, attempt: int, start: int, prompt_start: int) -> bool:
        """Sends an ended stream's tokens again; False if it is not known here."""
        entry = self._ended.get((request, attempt))
        if entry is None:
            return False
        _, reply_to, sender = entry
        self.send_again(reply_to, sender, start, prompt_start)
        return True

    def send_again(self, reply_to: str, sender: StreamSender, start: int, prompt_start: int) -> None:
        """A stream's tokens from `start` on, after the rows of its prompt if its owner lacks any."""
        rows = sender.scored_since(prompt_start) if prompt_start >= 0 else None
        if rows is not None:
            self.put(reply_to, rows)
        self.put(reply_to, sender.since(start))

    def expire(self, now: float) -> None:
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            self._ended.popitem(last=False)

    async def flush(self) -> None:
        """Sends what waits. While the bus is away it is dropped here: `Resume` brings it back."""
        waiting, self._waiting = self._waiting, {}
        for reply_to, items in waiting.items():
            try:
                await self._send(reply_to, items)
            except BusDown:
                return

    async def leaving(self, reply_to: str, requests: list[tuple[str, int]]) -> None:
        """Tells an owner that this worker drains, and which sequences could move."""
        with contextlib.suppress(BusDown):
            message = Leaving(worker=self._worker, epoch=self._epoch, requests=requests)
            await self._publish(reply_to, message)

    def forget(self, reply_to: str) -> None:
        """This tokenizer is gone: nothing more goes there, and nobody will resume its streams."""
        self._waiting.pop(reply_to, None)
        if self._watched.pop(reply_to, None) is not None:
            self._bus.unwatch(reply_to)
        for key in [key for key, ended in self._ended.items() if ended[1] == reply_to]:
            del self._ended[key]

    async def _send(self, reply_to: str, items: list[Tokens]) -> None:
        """One message, or several where one would be larger than the bus takes (after many a `Resume`)."""
        try:
            await self._publish(reply_to, TokenBatch(worker=self._worker, epoch=self._epoch, items=items))
        except MalformedMessage as error:
            if len(items) == 1:
                log.error("tokens of %s cannot be sent: %s", items[0].request, error)
                return
            middle = len(items) // 2
            await self._send(reply_to, items[:middle])
            await self._send(reply_to, items[middle:])

    async def _publish(self, reply_to: str, message: Message) -> None:
        await self._bus.publish(reply_to, message, reply=self._watch(reply_to))

    def _watch(self, reply_to: str) -> str:
        reply = self._watched.get(reply_to)
        if reply is None:
            reply = self._watched[reply_to] = self._bus.watch(reply_to, lambda: self._lost(reply_to))
        return reply

    def _lost(self, reply_to: str) -> None:
        if reply_to in self._watched:
            self._gone(reply_to)
