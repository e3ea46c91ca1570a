"""HTTP/1.1 by hand, for what no client library would send."""

from __future__ import annotations

import json
import socket
import struct
import urllib.parse
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    """One response, read to the connection's end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object; all four members must be there, and nothing else."""
        (error,) = json.loads(self.body).values()
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"] and error["type"]
        return error


def connect(url: str, timeout: float = 20.0) -> socket.socket:
    parsed = urllib.parse.urlparse(url)
    return socket.create_connection((parsed.hostname, parsed.port), timeout=timeout)


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: test",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def send(
    url: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    given = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
    if "Transfer-Encoding" not in given:
        given.setdefault("Content-Length", str(len(body)))
    with connect(url) as connection:
        connection.sendall(head(method, path, given) + body)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    """Reads until the other side closes.

    Raises:
        ConnectionResetError: it reset the connection instead.
    """
    raw = bytearray()
    while chunk := connection.recv(65_536):
        raw += chunk
    return parse_answer(bytes(raw))


def parse_answer(raw: bytes) -> Answer:
    top, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(first.split()[1]), headers, body)


def reset(connection: socket.socket) -> None:
    """Ends a connection with a RST, as a crashed client's would."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def dechunked(body: bytes) -> bytes:
    """The body of chunked transfer encoding."""
    out = bytearray()
    while body:
        size, _, rest = body.partition(b"\r\n")
        out += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return bytes(out)
