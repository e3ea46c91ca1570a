"""A model's weights in panels, in one file that all workers of a machine map: one copy in memory.

    page 0          magic, length of the header, the header in JSON
    next pages      the tensors, each at a multiple of 64 bytes

The file lies in the cache folder under a hash of the model's weights and of the code that packs. Small models
are packed anew each time, into the process's own memory.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from filelock import FileLock

from baton.models.description import DecoderConfig
from baton.runner import native_blocks, native_source
from baton.runner.native_blocks import matrix_bytes
from baton.runner.native_source import Source, open_source, vector_names
from baton_kernels.cpu import packing
from baton_kernels.cpu.library import CPacked
from baton_kernels.cpu.packing import GROUP, Kind

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"BATONPK1"
_START = struct.Struct("<8sQ")
_ALIGNMENT = 64
_PAGE = 4_096
_SMALL = 16 << 20  # bytes; below, packing takes less than it is worth keeping


class Entry(msgspec.Struct):
    """One tensor in the file. A vector (float32, filled up to whole groups) has kind -1."""

    offset: int
    nbytes: int
    kind: int
    rows: int
    groups: int


class _Header(msgspec.Struct):
    entries: dict[str, Entry]
    total: int


class PackedWeights:
    """Packed tensors by name; they live as long as this object."""

    def __init__(self, memory: Bytes, entries: dict[str, Entry]) -> None:
        self._memory = memory
        self._entries = entries

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def matrix(self, name: str, column: int = 0) -> CPacked:
        """A weight matrix for the kernels, its results to start at `column`."""
        entry = self._entries[name]
        return CPacked(self._address(entry), entry.kind, entry.rows, entry.groups, column)

    def bytes_a_value(self, name: str) -> float:
        """Packed size of a matrix, by value."""
        entry = self._entries[name]
        return entry.nbytes / (entry.rows * entry.groups * GROUP)

    def vector(self, name: str) -> int:
        """The address of a float32 vector."""
        return self._address(self._entries[name])

    def _address(self, entry: Entry) -> int:
        return int(self._memory.ctypes.data) + entry.offset


def load_packed(path: Path, config: DecoderConfig, weights: str, cache_dir: Path) -> PackedWeights:
    """The packed weights of a model, from the cache or packed now.

    Args:
        weights: the model's `weights_hash`.
        cache_dir: the file goes to its `packed` folder.

    Raises:
        ModelFileError: the model's file is damaged or lacks a tensor.
        UnsupportedModel: it has what the native kernels do not.
    """
    kept = cache_dir / "packed" / f"{weights}-{_packer_hash()}.panels"
    found = _map(kept)
    if found is not None:
        return found
    source = open_source(path, config)
    entries, total = _layout(source, config)
    if total < _SMALL:
        return _pack_private(source, entries, total)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(kept.with_suffix(".lock")):
            found = _map(kept)  # another worker may have been faster
            if found is None:
                _pack_to_file(source, entries, total, kept)
                found = _map(kept)
    except OSError as error:
        log.warning("packed weights are not shared between workers: %s", error)
    return found if found is not None else _pack_private(source, entries, total)


def _packer_hash() -> str:
    """Over the code that decides what a panel holds."""
    digest = hashlib.blake2b(digest_size=8)
    for module in (packing, native_blocks, native_source):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def _layout(source: Source, config: DecoderConfig) -> tuple[dict[str, Entry], int]:
    entries: dict[str, Entry] = {}
    at = 0

    def place(name: str, nbytes: int, kind: int, rows: int, groups: int) -> None:
        nonlocal at
        entries[name] = Entry(at, nbytes, kind, rows, groups)
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    for matrix in source.matrices():
        groups = -(-matrix.columns // GROUP)
        place(
            matrix.name,
            matrix_bytes(matrix.kind, matrix.rows, matrix.columns),
            matrix.kind,
            matrix.rows,
            groups,
        )
    groups = -(-config.hidden // GROUP)
    for name in vector_names(config):
        place(name, groups * GROUP * 4, -1, 1, groups)
    return entries, at


def _fill(source: Source, entries: dict[str, Entry], memory: Bytes) -> None:
    """Packs every tensor into its place in `memory`, which is all zeros."""

    def take(entry: Entry) -> Bytes:
        return memory[entry.offset : entry.offset + entry.nbytes]

    for matrix in source.matrices():
        to = take(entries[matrix.name])
        at = 0
        for part in source.packed(matrix):
            if part.kind != matrix.kind:
                raise AssertionError(f"{matrix.name} was announced as {matrix.kind}, packed as {part.kind}")
            to[at : at + part.data.nbytes] = part.data
            at += part.data.nbytes
    for name, entry in entries.items():
        if entry.kind < 0:
            values = source.vector(name)
            take(entry).view(np.float32)[: values.size] = values


def _pack_private(source: Source, entries: dict[str, Entry], total: int) -> PackedWeights:
    memory = np.frombuffer(mmap.mmap(-1, max(total, 1)), dtype=np.uint8)  # aligned to pages, and zero
    _fill(source, entries, memory)
    return PackedWeights(memory, entries)


def _pack_to_file(source: Source, entries: dict[str, Entry], total: int, path: Path) -> None:
    log.info("packing the weights for the CPU kernels (once)")
    started = time.monotonic()
    header, begin = _encode(entries, total)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem[:16]}-", suffix=".part") as part:
        part.write(header)
        part.truncate(begin + total)
        part.flush()
        with mmap.mmap(part.fileno(), begin + total) as mapped:
            _fill(source, entries, np.frombuffer(mapped, dtype=np.uint8)[begin:])
            mapped.flush()
        os.link(part.name, path)
    log.info("weights packed in %.1f s: %d MB", time.monotonic() - started, total >> 20)


def _encode(entries: dict[str, Entry], total: int) -> tuple[bytes, int]:
    """The header's bytes, and where the tensors begin."""
    text = msgspec.json.encode(_Header(entries, total))
    begin = -(-(_START.size + len(text)) // _PAGE) * _PAGE
    return _START.pack(_MAGIC, len(text)) + text, begin


def _map(path: Path) -> PackedWeights | None:
    """A kept file, mapped; None if there is none or it is not whole."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic, length = _START.unpack(file.read(_START.size))
            header = msgspec.json.decode(file.read(min(length, size)), type=_Header)
            begin = -(-(_START.size + length) // _PAGE) * _PAGE
            if magic != _MAGIC or size != begin + header.total:
                raise ValueError("it is cut short or of another version")
            for entry in header.entries.values():
                if not 0 <= entry.offset <= header.total - entry.nbytes or entry.kind not in (-1, *Kind):
                    raise ValueError("its header is damaged")
            populate = getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
        log.warning("packed weights are packed anew: %s: %s", path, error)
        path.unlink(missing_ok=True)
        return None
    return PackedWeights(np.frombuffer(mapped, dtype=np.uint8)[begin:], header.entries)
