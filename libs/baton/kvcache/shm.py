"""Pulling through shared memory: a read-only map of the peer's pool, and one copy."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from baton.kvcache.pool import KvPool, PoolError, checksum
from baton.kvcache.pull import Destination, PullError, damaged, stale
from baton.protocol.handoff import BlockRef

_MAX_MAPPED = 64
_THREADS = 2


def host_id(shm_dir: Path | str) -> str:
    """Names a kernel and the mount of `shm_dir`: equal in processes that can map each other's pools."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        kernel = f"{uuid.getnode():x}"
    return f"{kernel}:{os.stat(shm_dir).st_dev:x}"


class SharedMemory:
    """Copies blocks out of peers' pools, off the event loop. Keeps the pools it has mapped."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[tuple[str, int], KvPool] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-copy")

    def map(self, path: str, epoch: int) -> KvPool:
        """The peer's pool, mapped read-only.

        Raises:
            OSError, PoolError: as `KvPool.open_readonly`.
        """
        key = (path, epoch)
        pool = self._mapped.get(key)
        if pool is None:
            pool = self._mapped[key] = KvPool.open_readonly(path, epoch=epoch)
            if len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)  # unmapped with its last user
        self._mapped.move_to_end(key)
        return pool

    async def pull(
        self, source: KvPool, refs: Sequence[BlockRef], into: Destination, dest: Sequence[int]
    ) -> None:
        """Copies blocks and verifies the copies.

        When cancelled, it first waits for the block being copied: the caller may give the slots to others.

        Raises:
            PullError: stale, checksum, mismatch.
        """
        if source.block_bytes != into.block_bytes:
            sizes = f"{source.block_bytes} bytes there, {into.block_bytes} here"
            raise PullError("mismatch", f"blocks have {sizes}")
        stop = threading.Event()
        job = partial(_copy, source, list(refs), into, list(dest), stop)
        copying = asyncio.get_running_loop().run_in_executor(self._threads, job)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            stop.set()
            while not copying.done():
                try:
                    await asyncio.wait([copying])
                except asyncio.CancelledError:
                    continue
            copying.exception()
            raise

    def forget(self, epoch: int) -> None:
        """Unmaps the pool of a peer that has left."""
        for key in [key for key in self._mapped if key[1] == epoch]:
            del self._mapped[key]

    def close(self) -> None:
        self._mapped.clear()
        self._threads.shutdown(wait=True)


def _copy(
    source: KvPool, refs: list[BlockRef], into: Destination, dest: list[int], stop: threading.Event
) -> None:
    """Runs in a thread. The sum is taken of the destination: of what we now hold, not of what was there."""
    generations, data = source.generations, source.data
    for done, (ref, slot) in enumerate(zip(refs, dest, strict=True)):
        if stop.is_set():
            return
        if source.resolve(ref.slot, ref.generation) is None:
            raise stale(ref, done)
        target = into.view(slot)
        np.copyto(np.frombuffer(target, dtype=np.uint8), data[ref.slot])
        if int(generations[ref.slot]) != ref.generation:
            raise stale(ref, done)
        if checksum(target) != ref.checksum:
            raise damaged(ref, done)


def try_map(memory: SharedMemory, path: str, epoch: int) -> KvPool | None:
    """The peer's pool, or None if it cannot be mapped from here (gone, or in another's namespace).

    Raises:
        PullError: mismatch, for a pool of another epoch, version or shape.
    """
    try:
        return memory.map(path, epoch)
    except PoolError as error:
        raise PullError("mismatch", str(error)) from error
    except OSError:
        return None
