"""What a server sends, cut into messages as it arrives.

nats-py reads through a stream, a task, regular expressions and a queue with a task of its own for each
subscription, which costs more than all that is done with most messages. Messages for our receivers are cut
out and handed over here; everything else goes on to nats-py's reader as it came.

The protocol: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

_LINE_END = b"\r\n"
_MSG, _HMSG = b"MSG ", b"HMSG "
_VERSION = "NATS/1.0"

# subject, reply, payload, headers
Deliver = Callable[[str, str, bytes, dict[str, str] | None], None]


class Wire(asyncio.Protocol):
    """The protocol of a connection that is set up already; `rest` is nats-py's own."""

    def __init__(self, rest: asyncio.Protocol, receivers: Mapping[int, Deliver]) -> None:
        """Args: receivers: by subscription id. They do not raise."""
        self._rest = rest
        self._receivers = receivers
        self._buffer = bytearray()
        self._needed = 0  # bytes that the first frame in the buffer takes, once known

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        self._needed = 0
        done = self._cut(data)
        if done < len(data):
            self._buffer += data[done:]

    def _cut(self, data: bytes) -> int:
        """Deals with all whole frames; returns where the first that is not whole begins."""
        position, end = 0, len(data)
        while position < end:
            line_end = data.find(_LINE_END, position)
            if line_end < 0:
                break
            body, headed = line_end + 2, data.startswith(_HMSG, position)
            if not headed and not data.startswith(_MSG, position):
                self._rest.data_received(data[position:body])
                position = body
                continue
            # MSG subject sid [reply] size / HMSG subject sid [reply] header-size size
            fields = data[position:line_end].split()
            try:
                sid, size = int(fields[2]), int(fields[-1])
                head = int(fields[-2]) if headed else 0
                if not (0 <= head <= size and len(fields) - headed in (4, 5)):
                    raise ValueError
            except (ValueError, IndexError):
                self._rest.data_received(data[position:])  # nats-py says what is wrong, and reconnects
                return end
            following = body + size + 2
            if following > end:
                self._needed = following - position
                break
            deliver = self._receivers.get(sid)
            if deliver is None:
                self._rest.data_received(data[position:following])
            else:
                reply = fields[3].decode() if len(fields) - headed == 5 else ""
                headers = read_headers(data[body : body + head]) if headed else None
                deliver(fields[1].decode(), reply, data[body + head : body + size], headers)
            position = following
        return position

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._rest.eof_received()

    def pause_writing(self) -> None:
        self._rest.pause_writing()

    def resume_writing(self) -> None:
        self._rest.resume_writing()


def read_headers(raw: bytes) -> dict[str, str]:
    """Headers as nats-py has them: an inline status, as of a 503, comes as `Status` and `Description`."""
    first, *lines = raw.decode(errors="surrogateescape").split("\r\n")
    headers = {}
    status, _, description = first.removeprefix(_VERSION).strip().partition(" ")
    if status:
        headers["Status"] = status
        if description:
            headers["Description"] = description.strip()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers
