"""One connection between peers, plain or by TLS: bytes in order, straight into memory that is there.

TLS runs over memory buffers, since event loops take no TLS sockets in `sock_recv_into`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Protocol

from baton.config.tls import TlsError, client_context, server_context

_READ = 256 * 1_024


class Stream(Protocol):
    """What the block protocol is spoken over."""

    async def receive_into(self, view: memoryview) -> int:
        """Fills some of `view`; how many bytes, 0 at the end. Raises OSError."""

    async def send(self, data: bytes | memoryview) -> None:
        """Sends all of it. Raises OSError."""

    def close(self) -> None:
        """Idempotent."""


class PlainStream:
    """A non-blocking socket as it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive_into(self, view: memoryview) -> int:
        return await self._loop.sock_recv_into(self._sock, view)

    async def send(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self._sock, data)

    def close(self) -> None:
        self._sock.close()


class TlsStream:
    """TLS over a non-blocking socket. One reader and one writer at a time."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server)

    async def shake_hands(self) -> None:
        """
        Raises:
            OSError: the peer's certificate will not do, ours will not do for it, or it speaks no TLS.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._take():
                    raise ConnectionResetError(
                        "the peer closed the connection in the TLS handshake"
                    ) from None
            except ssl.SSLError:
                await self._flush()  # the alert that says why
                raise
        await self._flush()

    async def receive_into(self, view: memoryview) -> int:
        while True:
            try:
                return self._read(view)
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._take():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    async def send(self, data: bytes | memoryview) -> None:
        self._tls.write(data)
        await self._flush()

    def _read(self, view: memoryview) -> int:
        count: Any = self._tls.read(len(view), view)  # into a buffer, it gives a count
        return int(count)

    async def _take(self) -> bool:
        data = await self._loop.sock_recv(self._sock, _READ)
        self._arrived.write(data)
        return bool(data)

    async def _flush(self) -> None:
        if self._leaving.pending:
            await self._loop.sock_sendall(self._sock, self._leaving.read())

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Both ends' contexts: each shows its certificate, and takes those that the one CA has signed.

    Peers are addressed by number, so that a certificate proves membership, not a name; which peer it is, the
    secret that came over the bus proves.
    """

    client: ssl.SSLContext
    server: ssl.SSLContext

    @classmethod
    def of(cls, ca: str, cert: str, key: str) -> PeerTls | None:
        """None without a CA.

        Raises:
            TlsError: a file cannot be used, or one of the three is missing.
        """
        if not ca and not cert:
            return None
        if not (ca and cert and key):
            raise TlsError("worker.tls_ca, worker.tls_cert and worker.tls_key go together")
        return cls(client_context(ca, cert, key, check_name=False), server_context(cert, key, ca))


async def accepted(sock: socket.socket, tls: PeerTls | None) -> Stream:
    """The stream of a connection that a peer has opened. Raises OSError."""
    return await _opened(sock, tls.server if tls else None, server=True)


async def connected(sock: socket.socket, tls: PeerTls | None) -> Stream:
    """The stream of a connection opened to a peer. Raises OSError."""
    return await _opened(sock, tls.client if tls else None, server=False)


async def _opened(sock: socket.socket, context: ssl.SSLContext | None, *, server: bool) -> Stream:
    if context is None:
        return PlainStream(sock)
    stream = TlsStream(sock, context, server=server)
    await stream.shake_hands()
    return stream
