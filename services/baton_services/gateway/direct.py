"""Text from the bus straight to a client's socket."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from baton.protocol.request import TextDelta
from baton_services.gateway.shape import Shape

FULL = 65_536  # unsent bytes from which on a client counts as slow

_encode = msgspec.json.Encoder().encode


class Direct:
    """Writes a stream's deltas as they arrive, between prepared bytes, without waking the request's handler.

    It takes only what needs nothing else: plain text that follows on what was written already, to a client
    whose socket takes it. First and last deltas, logprobs, failures and slow clients are the handler's.
    """

    def __init__(self, http: web.Request, response: web.StreamResponse, shape: Shape) -> None:
        self._transport: asyncio.Transport | None = http.transport
        self._writer = http.writer
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._shape = shape
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def begin(self, index: int) -> None:
        """A choice's first delta has been written: the next ones may be taken."""
        around = self._shape.around(index)
        if around is not None:
            self._around[index] = around
        else:
            self._around.pop(index, None)

    def take(self, index: int, delta: TextDelta) -> bool:
        """Writes a delta, or says that it is the handler's."""
        around, transport = self._around.get(index), self._transport
        more = delta.finish or delta.tokens or delta.reasoning or delta.calls or delta.failure is not None
        if around is None or transport is None or more:
            return False
        if transport.is_closing() or transport.get_write_buffer_size() > FULL:
            return False
        frame = around[0] + _encode(delta.text) + around[1]
        if self._chunked:
            frame = b"%x\r\n%b\r\n" % (len(frame), frame)
        transport.write(frame)
        self._writer.output_size += len(frame)
        return True
