"""The owner's end of the TCP transport: serves blocks to whoever knows the secret."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl

from baton.kvcache import wire
from baton.kvcache.pull import BlockSource
from baton.kvcache.stream import PeerTls, Stream, accepted

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256
_HANDSHAKE_S = 5.0
_SEND_SLICE = 1 << 20  # progress is looked at this often while sending


class BlockServer:
    """Answers requests for blocks of one source, over TCP."""

    def __init__(
        self,
        source: BlockSource,
        *,
        secret: str,
        epoch: int,
        keep_s: float = 300.0,
        idle_s: float = 10.0,
        tls: PeerTls | None = None,
    ) -> None:
        """Serves `source`.

        Args:
            secret: what receivers must know; it travels over the bus only.
            epoch: the owner's; a receiver that wants another one is turned away.
            keep_s: how long a connection may lie unused.
            idle_s: how long a receiver may take no bytes in the middle of an answer.
            tls: with it, receivers must speak TLS and show a certificate.
        """
        if len(secret) < 16:
            raise ValueError("a secret takes at least 16 characters: use secrets.token_hex")
        self._source = source
        self._secret = secret
        self._epoch = epoch
        self._keep_s = keep_s
        self._idle_s = idle_s
        self._tls = tls
        self.connections = 0  # open now
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int = 0) -> int:
        """Listens; returns the port.

        Raises:
            OSError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        [(family, kind, protocol, _, address), *_] = await loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._serving = asyncio.create_task(self._serve(listener), name="block-server")
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Closes the listener and every connection. Idempotent."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        sock, peer = await loop.sock_accept(listener)
                    except OSError as error:  # out of descriptors, or the peer left at once
                        log.warning("block server cannot accept: %s", error)
                        await asyncio.sleep(0.1)
                        continue
                    if self.connections >= _MAX_CONNECTIONS:
                        log.warning("block server is full: %d connections; %s closed", self.connections, peer)
                        sock.close()
                        continue
                    self.connections += 1
                    group.create_task(self._talk(sock, f"{peer[0]}:{peer[1]}"))

    async def _talk(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(_HANDSHAKE_S):
                    stream = await accepted(sock, self._tls)
                block_bytes = await self._shake_hands(stream, peer)
                while block_bytes:
                    async with wire.IdleTimeout(self._keep_s) as timeout:
                        request = await wire.receive_frame(stream, wire.Request, timeout)
                    await self._answer(stream, request, block_bytes)
        except ssl.SSLError as error:
            log.warning("block server: %s fails at TLS: %s", peer, error)
        except wire.BadFrame as error:
            log.warning("block server: %s sent %s; closed", peer, error)
        except (OSError, TimeoutError) as error:  # the receiver left or is too slow: its own pull fails
            log.debug("block server: %s is gone: %s", peer, error)
        finally:
            self.connections -= 1

    async def _shake_hands(self, stream: Stream, peer: str) -> int:
        """The receiver's block size in bytes; 0 if it was turned away."""
        async with asyncio.timeout(_HANDSHAKE_S), wire.IdleTimeout(_HANDSHAKE_S) as timeout:
            hello = await wire.receive_frame(stream, wire.Hello, timeout)
            if (hello.magic, hello.version) != (wire.MAGIC, wire.VERSION):
                raise wire.BadFrame(f"protocol {hello.magic!r} {hello.version}")
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            mine = wire.proof(self._secret, "owner", hello, nonce)
            await stream.send(wire.pack(wire.Challenge(nonce=nonce, proof=mine)))
            try:
                shown = await wire.receive_frame(stream, wire.Proof, timeout)
            except ConnectionError:  # an honest receiver leaves when our proof is not what it expects
                log.warning("block server: %s left unproven; another secret?", peer)
                return 0
            welcome = wire.Welcome()
            if not wire.same(shown.proof, wire.proof(self._secret, "receiver", hello, nonce)):
                welcome = wire.Welcome(kind="refused", message="wrong secret")
            elif hello.epoch != self._epoch:
                welcome = wire.Welcome(kind="mismatch", message=f"epoch is {self._epoch}, not {hello.epoch}")
            await stream.send(wire.pack(welcome))
        if welcome.kind:
            log.warning("block server: %s refused: %s", peer, welcome.message)
            return 0
        return hello.block_bytes

    async def _answer(self, stream: Stream, request: wire.Request, block_bytes: int) -> None:
        """Sends the blocks asked for, each looked up before and after: it may be overwritten in between."""
        before = b""  # the last block's trailer goes out together with the next one's header
        async with wire.IdleTimeout(self._idle_s) as timeout:
            for slot, generation in request.blocks:
                view = self._source.resolve(slot, generation)
                status = wire.Status.OK
                if view is None:
                    status = wire.Status.STALE
                elif len(view) != block_bytes:
                    status = wire.Status.MISMATCH
                await stream.send(before + wire.HEADER.pack(slot, generation, status))
                if view is None or status is not wire.Status.OK:
                    before = b""
                    continue
                for at in range(0, block_bytes, _SEND_SLICE):
                    piece = view[at : at + _SEND_SLICE]
                    await stream.send(piece)
                    await timeout.progress(len(piece))
                stands = self._source.resolve(slot, generation) is not None
                before = wire.TRAILER.pack(wire.Status.OK if stands else wire.Status.STALE)
            await stream.send(before)
