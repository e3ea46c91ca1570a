"""A worker's KV pool: one file of KV blocks, written by its owner, mapped read-only by peers of the host.

    page 0            header: magic, version, epoch, geometry, sizes
    next page(s)      generations, uint64 [num_blocks]
    next page         data, uint8 [num_blocks, block_bytes]

The owner raises a slot's generation *before* it writes a slot that belonged to somebody else. A reader
compares the generation before and after its copy, and the checksum of the copy: that, not a lock, is what
makes a read safe (a seqlock; the checksum also covers machines with weaker memory ordering than x86).

The owner holds a `flock` on the file as long as it lives; `remove_stale` unlinks pools nobody holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from baton.protocol.liveness import Geometry

log = logging.getLogger(__name__)

MAGIC = b"BATONKV\0"
VERSION = 1
PREFIX = "baton-kv-"
SUFFIX = ".pool"

_PAGE = mmap.PAGESIZE
_HEADER = struct.Struct("<8sIIQQQQQQIII16s")
_MAX_POOL_BYTES = 1 << 44


class PoolError(RuntimeError):
    """A pool cannot be made, or a peer's file is not the pool that it is said to be."""


def checksum(view: memoryview | bytes | bytearray) -> int:
    """XXH3-64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(view)


class KvPool:
    """KV blocks in slots, with a generation each.

    Attributes:
        data: uint8 [num_blocks, block_bytes]; read-only in a pool opened by `open_readonly`.
        generations: uint64 [num_blocks]; likewise.
        path: the file, or empty for a private pool.
        before_read: called with a slot before its bytes are given out: an owner that computes elsewhere
            brings them here. May be called in any thread.
    """

    def __init__(
        self, memory: mmap.mmap, geometry: Geometry, num_blocks: int, *, epoch: int, path: str, owner_fd: int
    ) -> None:
        """Takes a mapping laid out as above; use `create`, `create_private` or `open_readonly`."""
        generations_at, data_at, total = _layout(geometry, num_blocks)
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.epoch = epoch
        self.path = path
        self.block_bytes = geometry.block_bytes
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            memory, dtype="<u8", count=num_blocks, offset=generations_at
        )
        self.data: npt.NDArray[np.uint8] = np.frombuffer(
            memory, dtype=np.uint8, count=total - data_at, offset=data_at
        ).reshape(num_blocks, geometry.block_bytes)
        self.before_read: Callable[[int], None] | None = None
        self._memory = memory
        self._owner_fd = owner_fd

    @classmethod
    def create(
        cls, directory: Path | str, name: str, geometry: Geometry, num_blocks: int, *, epoch: int
    ) -> KvPool:
        """Makes the pool of worker `name` in this `epoch`: a new file in `directory`, all its pages reserved.

        Raises:
            PoolError: no room, no directory, or a pool of this name and epoch lives already.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise PoolError(f"a pool is named by 1 to 64 letters, digits, '-' or '_'; got {name!r}")
        _, _, total = _layout(geometry, num_blocks)
        path = Path(directory) / f"{PREFIX}{name}-{epoch}{SUFFIX}"
        fd = _create_locked(path)
        try:
            _reserve(fd, total, path)
            memory = mmap.mmap(fd, total)
            _HEADER.pack_into(memory, 0, *_header_fields(geometry, num_blocks, epoch))
            return cls(memory, geometry, num_blocks, epoch=epoch, path=str(path), owner_fd=fd)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def create_private(cls, geometry: Geometry, num_blocks: int) -> KvPool:
        """A pool in this process's own memory, without a file; peers reach it over TCP only."""
        _, _, total = _layout(geometry, num_blocks)
        memory = mmap.mmap(-1, total)
        return cls(memory, geometry, num_blocks, epoch=0, path="", owner_fd=-1)

    @classmethod
    def open_readonly(cls, path: Path | str, *, epoch: int | None = None) -> KvPool:
        """Maps a peer's pool for reading: the mapping itself refuses writes.

        Args:
            epoch: the epoch the pool must be of; None takes any.

        Raises:
            FileNotFoundError: the owner has gone.
            PoolError: not a pool, of another version or epoch, or cut short.
        """
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size < _PAGE:
                raise PoolError(f"{path} is not a KV pool")
            geometry, num_blocks, found = _read_header(os.pread(fd, _HEADER.size, 0), info.st_size, path)
            if epoch is not None and found != epoch:
                raise PoolError(f"{path} is a pool of epoch {found}, not {epoch}")
            memory = mmap.mmap(fd, info.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return cls(memory, geometry, num_blocks, epoch=found, path=str(path), owner_fd=-1)

    def copy(self, source: int, target: int) -> None:
        """Gives a slot that nobody reads yet the content of another one."""
        self.data[target] = self.view(source)

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, uint8 [block_bytes]. Writable for the owner.

        Raises:
            IndexError: no such slot.
        """
        if not 0 <= slot < self.num_blocks:
            raise IndexError(f"slot {slot} of a pool of {self.num_blocks}")
        if self.before_read is not None:
            self.before_read(slot)
        return self.data[slot].data

    def resolve(self, slot: int, generation: int) -> memoryview | None:
        """A slot's bytes if it is still of `generation`."""
        if not 0 <= slot < self.num_blocks or int(self.generations[slot]) != generation:
            return None
        return self.view(slot)

    def close(self) -> None:
        """Ends the pool; the owner's file is unlinked. Idempotent.

        Arrays somebody still holds stay valid; the memory goes back with the last of them.
        """
        if self._owner_fd >= 0:
            Path(self.path).unlink(missing_ok=True)
            fcntl.flock(self._owner_fd, fcntl.LOCK_UN)  # the mapping has a duplicate of the descriptor
            os.close(self._owner_fd)
            self._owner_fd = -1
        self.generations = np.zeros(0, dtype=np.uint64)
        self.data = np.zeros((0, self.block_bytes), dtype=np.uint8)
        self.num_blocks = 0
        with contextlib.suppress(BufferError):  # views are out: the mapping ends with them
            self._memory.close()


def remove_stale(directory: Path | str) -> list[str]:
    """Unlinks the pools in `directory` whose owner is gone; returns their paths."""
    removed = []
    for path in sorted(Path(directory).glob(f"{PREFIX}*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:  # another user's pool is that user's to remove
            log.debug("left alone: %s", error)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(str(path))
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def _layout(geometry: Geometry, num_blocks: int) -> tuple[int, int, int]:
    """Offset of the generations, offset of the data, and the whole size, in bytes."""
    if geometry.block_bytes <= 0 or geometry.block_size <= 0 or num_blocks <= 0:
        raise PoolError(f"a pool needs blocks: got {num_blocks} of {geometry.block_bytes} bytes")
    data_at = _PAGE + -(-num_blocks * 8 // _PAGE) * _PAGE
    total = data_at + num_blocks * geometry.block_bytes
    if total > _MAX_POOL_BYTES:
        raise PoolError(f"a pool of {total} bytes is beyond {_MAX_POOL_BYTES}")
    return _PAGE, data_at, total


def _header_fields(geometry: Geometry, num_blocks: int, epoch: int) -> tuple[bytes | int, ...]:
    generations_at, data_at, total = _layout(geometry, num_blocks)
    sizes = (epoch, num_blocks, geometry.block_bytes, generations_at, data_at, total)
    shape = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype.encode()[:16])
    return (MAGIC, VERSION, geometry.block_size, *sizes, *shape)


def _read_header(raw: bytes, size: int, path: Path | str) -> tuple[Geometry, int, int]:
    """Geometry, number of blocks and epoch, checked against the file's own size."""
    magic, version, block_size, epoch, blocks, block_bytes, at, data_at, total, *shape = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise PoolError(f"{path} is not a KV pool of version {VERSION}")
    geometry = Geometry(
        block_size=block_size,
        block_bytes=block_bytes,
        layers=shape[0],
        kv_heads=shape[1],
        head_dim=shape[2],
        dtype=shape[3].rstrip(b"\0").decode(errors="replace"),
    )
    if (at, data_at, total) != _layout(geometry, blocks) or total != size:
        raise PoolError(f"{path} is cut short or damaged: {size} bytes, its header says {total}")
    return geometry, blocks, epoch


def _create_locked(path: Path) -> int:
    """Creates `path` and takes its lock; `remove_stale` may come in between, and then it starts again."""
    for _ in range(100):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise PoolError(f"{path} exists: another worker of this name and epoch lives") from None
        except OSError as error:
            raise PoolError(f"cannot create a KV pool: {error}; choose another --shm-dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
    raise PoolError(f"{path} is removed as fast as it is created")


def _reserve(fd: int, total: int, path: Path) -> None:
    """Sizes the file and takes all its pages now: on a full tmpfs an error here, not a SIGBUS in a step."""
    try:
        os.ftruncate(fd, total)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, total)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        free = os.statvfs(path.parent)
        free_mb = free.f_bavail * free.f_frsize >> 20
        raise PoolError(
            f"no room for a KV pool of {total >> 20} MB in {path.parent} ({free_mb} MB free): "
            "lower --kv-memory-mb or choose another --shm-dir"
        ) from error
