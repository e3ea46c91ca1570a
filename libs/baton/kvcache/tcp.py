"""Pulling over TCP: the receiver connects and asks; bytes arrive straight in its pool."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import OrderedDict, deque
from collections.abc import Sequence

from baton.kvcache import wire
from baton.kvcache.pool import checksum
from baton.kvcache.pull import Destination, Kind, PullError, damaged, stale
from baton.kvcache.stream import PeerTls, Stream, connected
from baton.protocol.handoff import BlockRef

_KINDS: dict[str, Kind] = {"refused": "refused", "mismatch": "mismatch"}
_AHEAD = 2  # requests on their way before the first answer is read
_PER_PEER = 4  # connections to one peer
_MAX_PEERS = 64


class Connection:
    """One authenticated connection to a peer's `BlockServer`. One pull at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        secret: str,
        epoch: int,
        block_bytes: int,
        idle_s: float,
        tls: PeerTls | None = None,
    ) -> Connection:
        """Connects and shakes hands.

        Raises:
            PullError: refused (either side does not know the secret), mismatch.
            OSError, TimeoutError, wire.BadFrame: the connection failed.
        """
        async with wire.IdleTimeout(idle_s) as timeout:
            sock = await _connect(host, port)
            try:
                stream = await connected(sock, tls)
                await _shake_hands(stream, secret, epoch, block_bytes, timeout)
            except BaseException:
                sock.close()
                raise
        return cls(stream)

    async def fetch(
        self, refs: Sequence[BlockRef], into: Destination, dest: Sequence[int], idle_s: float
    ) -> None:
        """Receives blocks into their slots and verifies them. After an error the connection is of no use.

        Raises:
            PullError: stale, checksum, mismatch.
            OSError, TimeoutError: the connection failed.
        """
        pieces = [range(at, min(at + wire.MAX_REFS, len(refs))) for at in range(0, len(refs), wire.MAX_REFS)]
        waiting = deque(pieces)
        async with wire.IdleTimeout(idle_s) as timeout:
            for piece in pieces:
                while waiting and waiting[0].start < piece.start + _AHEAD * wire.MAX_REFS:
                    await self._ask([refs[index] for index in waiting.popleft()])
                await self._receive(piece, refs, into, dest, timeout)

    async def _ask(self, refs: list[BlockRef]) -> None:
        request = wire.Request(blocks=[(ref.slot, ref.generation) for ref in refs])
        await self._stream.send(wire.pack(request))

    async def _receive(
        self,
        piece: range,
        refs: Sequence[BlockRef],
        into: Destination,
        dest: Sequence[int],
        timeout: wire.IdleTimeout,
    ) -> None:
        head = memoryview(bytearray(wire.TRAILER_AND_HEADER.size))
        await wire.receive_into(self._stream, head[1:], timeout)
        for index in piece:
            ref, target = refs[index], into.view(dest[index])
            slot, generation, status = wire.HEADER.unpack(head[1:])
            if (slot, generation) != (ref.slot, ref.generation):
                raise PullError("mismatch", "the owner answered for another block", done=index)
            if status == wire.Status.MISMATCH:
                raise PullError("mismatch", f"the owner's blocks have not {len(target)} bytes", done=index)
            if status != wire.Status.OK:
                raise stale(ref, index)
            await wire.receive_into(self._stream, target, timeout)
            await wire.receive_into(self._stream, head[:1] if index == piece[-1] else head, timeout)
            if head[0] != wire.Status.OK:
                raise stale(ref, index)
            if checksum(target) != ref.checksum:
                raise damaged(ref, index)

    def close(self) -> None:
        self._stream.close()


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _shake_hands(
    stream: Stream, secret: str, epoch: int, block_bytes: int, timeout: wire.IdleTimeout
) -> None:
    hello = wire.Hello(
        magic=wire.MAGIC,
        version=wire.VERSION,
        epoch=epoch,
        block_bytes=block_bytes,
        nonce=secrets.token_bytes(wire.NONCE_BYTES),
    )
    await stream.send(wire.pack(hello))
    challenge = await wire.receive_frame(stream, wire.Challenge, timeout)
    if not wire.same(challenge.proof, wire.proof(secret, "owner", hello, challenge.nonce)):
        raise PullError("refused", "the peer does not know the secret that came with its blocks")
    answer = wire.Proof(proof=wire.proof(secret, "receiver", hello, challenge.nonce))
    await stream.send(wire.pack(answer))
    welcome = await wire.receive_frame(stream, wire.Welcome, timeout)
    if welcome.kind:
        raise PullError(_KINDS.get(welcome.kind, "refused"), welcome.message)


class _Peer:
    """The connections to one peer's server."""

    def __init__(self) -> None:
        self.limit = asyncio.Semaphore(_PER_PEER)
        self.users = 0
        self.idle: list[Connection] = []
        self.left = False

    def close(self) -> None:
        self.left = True
        while self.idle:
            self.idle.pop().close()


class Connections:
    """Connections kept and reused, bounded for each peer and in all."""

    def __init__(self, idle_s: float, tls: PeerTls | None = None) -> None:
        self._idle_s = idle_s
        self._tls = tls
        self._peers: OrderedDict[tuple[str, int, str, int, int], _Peer] = OrderedDict()

    async def pull(
        self,
        host: str,
        port: int,
        secret: str,
        epoch: int,
        refs: Sequence[BlockRef],
        into: Destination,
        dest: Sequence[int],
    ) -> None:
        """Pulls blocks over a kept connection, or a new one.

        Raises:
            PullError: any kind.
        """
        key = (host, port, secret, epoch, into.block_bytes)
        peer = self._peer(key)
        peer.users += 1
        try:
            async with asyncio.timeout(self._idle_s):
                await peer.limit.acquire()
            try:
                await self._pull(peer, key, refs, into, dest)
            finally:
                peer.limit.release()
        except TimeoutError as error:
            raise PullError("timeout", f"{host}:{port} was silent for {self._idle_s:g} s") from error
        except (OSError, wire.BadFrame) as error:
            raise PullError("unreachable", f"{host}:{port}: {error}") from error
        finally:
            peer.users -= 1

    async def _pull(
        self,
        peer: _Peer,
        key: tuple[str, int, str, int, int],
        refs: Sequence[BlockRef],
        into: Destination,
        dest: Sequence[int],
    ) -> None:
        while peer.idle:
            try:
                await self._fetch(peer, peer.idle.pop(), refs, into, dest)
                return
            except ConnectionError:  # closed by the peer while it lay idle: it may still take a new one
                continue
        await self._fetch(peer, await Connection.open(*key, self._idle_s, self._tls), refs, into, dest)

    async def _fetch(
        self,
        peer: _Peer,
        connection: Connection,
        refs: Sequence[BlockRef],
        into: Destination,
        dest: Sequence[int],
    ) -> None:
        try:
            await connection.fetch(refs, into, dest, self._idle_s)
        except BaseException:
            connection.close()
            raise
        if peer.left:
            connection.close()
        else:
            peer.idle.append(connection)

    def _peer(self, key: tuple[str, int, str, int, int]) -> _Peer:
        peer = self._peers.setdefault(key, _Peer())
        self._peers.move_to_end(key)
        for other in [other for other, kept in self._peers.items() if not kept.users]:
            if len(self._peers) <= _MAX_PEERS or other == key:
                break
            self._peers.pop(other).close()
        return peer

    def forget(self, epoch: int) -> None:
        """Closes the connections to a peer that has left."""
        for key in [key for key in self._peers if key[3] == epoch]:
            self._peers.pop(key).close()

    def close(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()
