"""The compiled kernels behind ctypes. `abi.h` has the same structs; a call releases the GIL."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

EMBED, PROJECT, ATTEND = 0, 1, 2
NORMED, ATTENDED, GATED = 0, 1, 2
TO_WIDE, ADD_TO_HIDDEN, TO_LOGITS = 0, 1, 2
MAX_PARTS = 3


class CPacked(Structure):
    """A weight matrix in panels, and the output column of its first row."""

    _fields_ = [
        ("data", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("groups", c_int32),
        ("column", c_int32),
    ]


class COp(Structure):
    """One operation of the prepared list."""

    _fields_ = [
        ("code", c_int32),
        ("source", c_int32),
        ("target", c_int32),
        ("layer", c_int32),
        ("sampled_only", c_int32),
        ("parts", c_int32),
        ("norm", c_void_p),
        ("part", CPacked * MAX_PARTS),
    ]


class CShape(Structure):
    _fields_ = [
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("ffn", c_int32),
        ("layers", c_int32),
        ("block_size", c_int32),
        ("vocab", c_int32),
        ("eps", c_float),
    ]


class CStep(Structure):
    """One step. Pointers into arrays that their owner keeps until the call is back."""

    _fields_ = [
        ("rows", c_int32),
        ("spans", c_int32),
        ("sampled", c_int32),
        ("blocks", c_int32),
        ("ids", c_void_p),
        ("span", c_void_p),
        ("tables", c_void_p),
        ("sampled_rows", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("choices", c_void_p),
        ("chosen", c_void_p),
        ("top_ids", c_void_p),
        ("top", c_void_p),
        ("tops", c_int32),
        ("choosable", c_int32),
    ]


# CStep, to be written at once: a call for each field costs more than a small step has to spare.
STEP = struct.Struct("@4i 7P q P q 4P 2i")

# Choice of choice.h, field by field, and Chosen.
CHOICE = struct.Struct("<4d 3f 5i 6Q 2i")
CHOSEN = struct.Struct("<2i d")


class Library:
    """A loaded variant."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: the file is no library for this machine.
        """
        loaded = ctypes.CDLL(str(path))
        self._create = loaded.baton_create
        self._create.argtypes = [POINTER(CShape), POINTER(COp), c_int32, c_int32]
        self._create.restype = c_void_p
        self._destroy = loaded.baton_destroy
        self._destroy.argtypes = [c_void_p]
        self._destroy.restype = None
        self._step = loaded.baton_step
        self._step.argtypes = [c_void_p, POINTER(CStep)]
        self._step.restype = c_int32
        self._choose = loaded.baton_choose
        self._choose.argtypes = [c_void_p, POINTER(CStep)]
        self._choose.restype = c_int32
        self._join = loaded.baton_join
        self._join.argtypes = [c_void_p, c_void_p, c_int32]
        self._join.restype = None
        self._allowed = loaded.baton_allowed
        self._allowed.argtypes = [c_void_p]
        self._allowed.restype = c_int32
        self._profile = loaded.baton_profile
        self._profile.argtypes = [c_void_p, POINTER(c_double)]
        self._profile.restype = None
        self._multiply_bytes = loaded.baton_multiply_bytes
        self._multiply_bytes.argtypes = [c_int64]
        self._multiply_floats = loaded.baton_multiply_floats
        self._multiply_floats.argtypes = [c_int64]
        self._multiply_floats.restype = c_float
        self._read_bytes = loaded.baton_read_bytes
        self._read_bytes.argtypes = [c_void_p, c_int64]

    def multiply_bytes(self, rounds: int) -> int:
        """Does as many multiplications of bytes as one thread can, and says how many."""
        self._multiply_bytes(rounds)
        return rounds * 12 * 32

    def multiply_floats(self, rounds: int) -> int:
        """Does as many multiply-adds of float32 as one thread can, and says how many."""
        self._multiply_floats(rounds)
        return rounds * 12 * 8

    def read_bytes(self, address: int, count: int) -> int:
        """Reads memory as fast as one thread can; `count` bytes, a multiple of 128."""
        self._read_bytes(address, count)
        return count

    def executor(self, shape: CShape, ops: list[COp], threads: int) -> Executor:
        """Prepares a list of operations; what their pointers name must outlive the executor.

        Raises:
            MemoryError: no memory or no threads to be had.
        """
        handle = self._create(ctypes.byref(shape), (COp * len(ops))(*ops), len(ops), threads)
        if not handle:
            raise MemoryError(f"no memory, or no {threads} threads, for the CPU kernels")
        return Executor(self, handle, len(ops))


class Executor:
    """A prepared list of operations with its threads and buffers. One step at a time."""

    def __init__(self, library: Library, handle: int, ops: int) -> None:
        self._library = library
        self._handle: int | None = handle
        self._ops = ops
        self._seconds: ctypes.Array[c_double] | None = None

    def step(self, step: CStep) -> None:
        """Runs all operations on a step, and its choices if it has any.

        Raises:
            ValueError: the step names tokens, rows or slots that do not exist; nothing was computed.
            MemoryError: no room for its buffers.
            RuntimeError: the executor is closed.
        """
        self._call(self._library._step, step)

    def choose(self, step: CStep) -> None:
        """Only the choices of a step, out of logits that are there. Raises as `step` does."""
        self._call(self._library._choose, step)

    def _call(self, function: Callable[..., int], step: CStep) -> None:
        if self._handle is None:
            raise RuntimeError("the runner is closed")
        code = function(self._handle, ctypes.byref(step))
        if code == -1:
            raise ValueError("a step names tokens, rows or KV slots that do not exist")
        if code:
            raise MemoryError("no memory for the buffers of a step")

    def join(self, ledger: int, seat: int) -> None:
        """From now on, share cores by the ledger at this address, which stays mapped until `close`."""
        self._library._join(self._handle, ledger, seat)

    def allowed(self) -> int:
        """How many threads a step may use now."""
        return int(self._library._allowed(self._handle))

    def profile(self) -> ctypes.Array[c_double]:
        """From now on, seconds spent in each operation are added up here: float64 [operations]."""
        self._seconds = (c_double * self._ops)()
        self._library._profile(self._handle, self._seconds)
        return self._seconds

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        if self._handle is not None:
            self._library._destroy(self._handle)
            self._handle = None
