"""Which worker of a machine uses which of its cores: a file in shared memory, `cores.h` has its layout.

Each worker takes a seat and says how many cores it owns. A busy one uses the cores of idle ones beside its
own (the kernels look at every operation). A seat whose process is gone is cleared by the next that comes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

import numpy as np

SEATS = 63
_SEAT = struct.Struct("<qii")  # busy until, cores, process
_SEAT_BYTES = 64
_COUNT = struct.Struct("<i")  # before the seats: how many have ever been taken
_BYTES = _SEAT_BYTES * (SEATS + 1)


class CoreLedger:
    """A seat in the ledger of this machine and user, until `leave`."""

    def __init__(self, directory: Path, cores: int) -> None:
        """
        Args:
            directory: a tmpfs that all workers of the machine share.
            cores: how many this worker owns.

        Raises:
            OSError: the ledger cannot be opened there, or all seats are taken.
        """
        self._path = directory / f"baton-cores-1-{os.getuid()}"
        self.cores = cores
        self._file = _open(self._path)
        try:
            if os.fstat(self._file).st_size < _BYTES:
                os.ftruncate(self._file, _BYTES)
            self._map = mmap.mmap(self._file, _BYTES)
            self.seat = self._sit()
        except BaseException:
            _close(self._file)
            raise
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def leave(self) -> None:
        """Give the seat up. The memory stays mapped as long as this object. Idempotent."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._clear(self.seat)
            if not any(self._owned(seat) for seat in range(SEATS)):
                self._path.unlink(missing_ok=True)
            _close(self._file)
            self._file = -1

    def _sit(self) -> int:
        free = None
        for seat in reversed(range(SEATS)):
            if not self._owned(seat):
                self._clear(seat)
                free = seat
        if free is None:
            raise OSError(f"{self._path}: all {SEATS} seats are taken")
        (count,) = _COUNT.unpack_from(self._map, 0)
        _SEAT.pack_into(self._map, self._at(free), 0, self.cores, os.getpid())
        _COUNT.pack_into(self._map, 0, max(count, free + 1))
        return free

    def _owned(self, seat: int) -> bool:
        _, cores, process = _SEAT.unpack_from(self._map, self._at(seat))
        return bool(cores) and _lives(process)

    def _clear(self, seat: int) -> None:
        _SEAT.pack_into(self._map, self._at(seat), 0, 0, 0)

    @staticmethod
    def _at(seat: int) -> int:
        return _SEAT_BYTES * (seat + 1)


def _open(path: Path) -> int:
    """The file, locked. Whoever leaves last removes it: it may have gone while this waited for the lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file
        except FileNotFoundError:
            pass
        _close(file)


def _close(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do: a mapping has a descriptor of its own
    os.close(file)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
