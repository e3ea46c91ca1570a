"""Moving KV blocks: one operation, *pull these blocks of that peer*, over the best transport both have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from baton.kvcache.pull import BlockSource, Destination, PullError, PullStats
from baton.kvcache.server import BlockServer
from baton.kvcache.shm import SharedMemory, host_id, try_map
from baton.kvcache.stream import PeerTls
from baton.kvcache.tcp import Connections
from baton.protocol.handoff import Address, BlockRef

__all__ = [
    "BlockServer",
    "BlockSource",
    "Destination",
    "PeerTls",
    "PullError",
    "PullStats",
    "Puller",
    "Transports",
    "host_id",
]


class Transports:
    """Pulls blocks of peers' pools into slots of ours.

    The slots must be private to the caller until `pull` returns. After an error, or a cancellation, nothing
    writes to them any more.
    """

    def __init__(
        self,
        *,
        shm_dir: Path | str,
        transports: Sequence[str] = ("shm", "tcp"),
        idle_s: float = 5.0,
        tls: PeerTls | None = None,
    ) -> None:
        """Uses the transports named.

        Args:
            shm_dir: where this host's pools lie.
            transports: what this side is willing to use.
            idle_s: how long a peer may be silent before a pull fails.
            tls: for TCP, to peers that speak it as well.
        """
        self._host = host_id(shm_dir) if "shm" in transports else ""
        self._transports = frozenset(transports)
        self._memory = SharedMemory()
        self._connections = Connections(idle_s, tls)

    async def pull(
        self,
        into: Destination,
        address: Address,
        secret: str,
        epoch: int,
        refs: Sequence[BlockRef],
        dest: Sequence[int],
    ) -> PullStats:
        """Copies the peer's blocks `refs` into slots `dest` of `into`; verifies each one's checksum.

        Raises:
            PullError: a block could not be had, or is not what was announced.
            ValueError: `refs` and `dest` do not pair up.
        """
        if len(refs) != len(dest) or len(set(dest)) != len(dest):
            raise ValueError(f"{len(refs)} blocks for {len(set(dest))} different slots")
        if any(not (0 <= ref.slot < 2**32 and 0 <= ref.generation < 2**64) for ref in refs):
            raise PullError("mismatch", "a block's slot or generation is out of range")
        began = time.perf_counter()
        transport = await self._pull(into, address, secret, epoch, refs, dest) if refs else "none"
        return PullStats(len(refs) * into.block_bytes, time.perf_counter() - began, transport)

    async def _pull(
        self,
        into: Destination,
        address: Address,
        secret: str,
        epoch: int,
        refs: Sequence[BlockRef],
        dest: Sequence[int],
    ) -> str:
        for transport in address.transports:
            if transport not in self._transports:
                continue
            if transport == "shm" and address.host == self._host and address.path:
                source = try_map(self._memory, address.path, epoch)
                if source is not None:
                    await self._memory.pull(source, refs, into, dest)
                    return "shm"
            if transport == "tcp" and address.tcp_port:
                host, port = address.tcp_host, address.tcp_port
                await self._connections.pull(host, port, secret, epoch, refs, into, dest)
                return "tcp"
        offered = ", ".join(address.transports) or "none"
        raise PullError("unreachable", f"no common transport works; the peer offers {offered}")

    def forget(self, epoch: int) -> None:
        """Unmaps and disconnects from a peer that has left."""
        self._memory.forget(epoch)
        self._connections.forget(epoch)

    def close(self) -> None:
        """Ends every mapping and connection. Pulls under way must have ended."""
        self._connections.close()
        self._memory.close()


class Puller:
    """`Transports` with one destination: a worker's own pool."""

    def __init__(
        self,
        into: Destination,
        *,
        shm_dir: Path | str,
        transports: Sequence[str] = ("shm", "tcp"),
        idle_s: float = 5.0,
        tls: PeerTls | None = None,
    ) -> None:
        """Pulls into `into`; for the rest see `Transports`."""
        self._into = into
        self._transports = Transports(shm_dir=shm_dir, transports=transports, idle_s=idle_s, tls=tls)

    async def pull(
        self, address: Address, secret: str, epoch: int, refs: Sequence[BlockRef], dest: Sequence[int]
    ) -> PullStats:
        """As `Transports.pull`, into slots `dest` of the pool."""
        return await self._transports.pull(self._into, address, secret, epoch, refs, dest)

    def forget(self, epoch: int) -> None:
        """Unmaps and disconnects from a peer that has left."""
        self._transports.forget(epoch)

    def close(self) -> None:
        """Ends every mapping and connection. Pulls under way must have ended."""
        self._transports.close()
