"""GGUF files, versions 2 and 3: metadata and tensors, read from a memory map.

The file is not trusted: every length, count, offset and nesting is checked against the file's size before it
is used. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.models.errors import ModelFileError
from baton.models.ggml_types import OTHER_TYPES, GgmlType
from baton.models.mapped import map_file

Bytes = npt.NDArray[np.uint8]

# Far above any real file; they keep a hostile one from costing more than a second or two.
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_STRINGS = 2_097_152  # in arrays, of all metadata together
MAX_INNER_ARRAYS = 65_536  # likewise
MAX_NAME_BYTES = 65_535
MAX_DIMENSIONS = 4
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is row-major as numpy has it ([out, in] for a linear layer)."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int  # from the start of the file
    nbytes: int


class GgufFile:
    """An opened GGUF file. The map lives as long as this object or any array that `raw` returned.

    `metadata` holds str, int, float, bool, list[str] and numpy arrays (nested arrays are lists of these);
    `tensors` is in the order of the file.
    """

    def __init__(
        self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo], data: Bytes
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map and parse a file.

        Raises:
            ModelFileError: unreadable, cut off, not GGUF, inconsistent, or of an unsupported version or type.
        """
        path = Path(path)
        view = map_file(path)
        reader = _Reader(path, view)
        metadata, tensors = reader.read()
        return cls(path, metadata, tensors, np.frombuffer(view, dtype=np.uint8))

    def raw(self, name: str) -> Bytes:
        """A tensor's bytes as they lie in the file: a read-only uint8 view [nbytes].

        Raises:
            ModelFileError: the file has no such tensor.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: has no tensor {name!r}")
        return self._data[info.offset : info.offset + info.nbytes]


class _Reader:
    """A cursor over the header. `position` never passes `size`: `_take` is the only way forward."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.position = 0
        self.strings = 0
        self.inner_arrays = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """The whole header."""
        num_tensors, num_keys = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"metadata key {_short(key)} appears twice")
            kind = self._u32(f"the type of {_short(key)}")
            metadata[key] = self._value(key, kind, 0)
        alignment = self._alignment(metadata)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = -(-self.position // alignment) * alignment
        return metadata, self._place(infos, start, alignment)

    def _preamble(self) -> tuple[int, int]:
        """Magic, version and counts: (tensors, metadata keys)."""
        magic = bytes(self.view[:4])
        if magic != b"GGUF":
            raise self._error("is not a GGUF file (it does not start with 'GGUF')")
        self._take(4, "the magic")
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:
            raise self._error("is a big-endian GGUF file; only little-endian ones are read")
        if version not in (2, 3):
            raise self._error(f"is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_keys = self._u64("the number of tensors"), self._u64("the number of metadata keys")
        # A tensor's entry takes 32 bytes at least, a key's 13.
        if num_tensors > min(MAX_TENSORS, self.size // 32):
            raise self._error(f"claims {num_tensors} tensors, more than it can hold")
        if num_keys > min(MAX_KEYS, self.size // 13):
            raise self._error(f"claims {num_keys} metadata keys, more than it can hold")
        return num_tensors, num_keys

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {_short(alignment)}, not a power of two")
        return alignment

    def _value(self, key: str, kind: int, depth: int) -> Any:
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return scalar.unpack(self._take(scalar.size, f"the value of {_short(key)}"))[0]
        if kind == _STRING:
            return self._string(f"the value of {_short(key)}")
        if kind == _ARRAY:
            return self._array(key, depth)
        raise self._error(f"metadata {_short(key)} has the unknown type {kind}")

    def _array(self, key: str, depth: int) -> Any:
        if depth >= MAX_NESTING:
            raise self._error(f"metadata {_short(key)} nests arrays more than {MAX_NESTING} deep")
        kind = self._u32(f"the element type of {_short(key)}")
        count = self._u64(f"the length of {_short(key)}")
        scalar = _SCALARS.get(kind)
        least = scalar.size if scalar is not None else 8 if kind == _STRING else 12
        if kind not in (_STRING, _ARRAY) and scalar is None:
            raise self._error(f"metadata {_short(key)} is an array of the unknown type {kind}")
        if count > (self.size - self.position) // least:
            raise self._error(f"metadata {_short(key)} claims {count} items, more than the file can hold")
        if scalar is not None:
            raw = self._take(count * least, f"the items of {_short(key)}")
            items = np.frombuffer(raw, dtype=np.uint8 if kind == _BOOL else scalar.format)
            return items != 0 if kind == _BOOL else items.copy()
        if kind == _STRING:
            self.strings += count
            if self.strings > MAX_STRINGS:
                raise self._error(f"metadata holds more than {MAX_STRINGS} strings")
            return self._strings(key, count)
        self.inner_arrays += count
        if self.inner_arrays > MAX_INNER_ARRAYS:
            raise self._error(f"metadata holds more than {MAX_INNER_ARRAYS} inner arrays")
        return [self._value(key, kind, depth + 1) for _ in range(count)]

    def _strings(self, key: str, count: int) -> list[str]:
        """`count` strings. A tight loop: a vocabulary and its merges are some hundred thousand."""
        view, position, size, length_at = self.view, self.position, self.size, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        for number in range(count):
            start = position + 8
            if start > size:
                raise self._error(f"is cut off in string {number} of {_short(key)}")
            position = start + length_at(view, position)[0]
            if position > size:
                raise self._error(f"is cut off in string {number} of {_short(key)}")
            try:
                append(str(view[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                raise self._error(f"string {number} of {_short(key)} is not UTF-8") from error
        self.position = position
        return strings

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GgmlType, int, int]:
        """One entry: (name, shape, type, offset from the data's start, bytes)."""
        name = self._name("a tensor's name")
        dimensions = self._u32(f"the rank of {_short(name)}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {_short(name)} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        # ggml counts dimensions from the fastest, numpy from the slowest.
        shape = tuple(self._u64(f"the shape of {_short(name)}") for _ in range(dimensions))[::-1]
        number = self._u32(f"the type of {_short(name)}")
        offset = self._u64(f"the offset of {_short(name)}")
        try:
            kind = GgmlType(number)
        except ValueError:
            known = ", ".join(member.name for member in GgmlType)
            label = f"{OTHER_TYPES[number]}" if number in OTHER_TYPES else f"number {number}"
            raise self._error(f"tensor {_short(name)} has type {label}; read are {known}") from None
        if shape[-1] % kind.block_values:
            raise self._error(
                f"tensor {_short(name)}: rows of {shape[-1]} values are no whole {kind.name} blocks"
            )
        values = 1
        for extent in shape:
            values *= extent
        if values == 0:
            raise self._error(f"tensor {_short(name)} has an empty shape {list(shape)}")
        return name, shape, kind, offset, values // kind.block_values * kind.block_bytes

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], GgmlType, int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """Check that every tensor lies aligned, within the file, and apart from the others."""
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, nbytes in infos:
            if name in tensors:
                raise self._error(f"tensor {_short(name)} appears twice")
            if offset % alignment:
                raise self._error(f"tensor {_short(name)} lies at {offset}, not a multiple of {alignment}")
            if start + offset + nbytes > self.size:
                raise self._error(
                    f"is cut off: tensor {_short(name)} ends at byte {start + offset + nbytes}"
                    f" of {self.size}; fetch the file again"
                )
            tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self._error(f"tensors {_short(before)} and {_short(info.name)} overlap")
            end, before = info.offset + info.nbytes, info.name
        return tensors

    def _name(self, what: str) -> str:
        length = self._u64(f"the length of {what}")
        if length > MAX_NAME_BYTES:
            raise self._error(f"{what} is {length} bytes long, at most {MAX_NAME_BYTES} are allowed")
        return self._text(length, what)

    def _string(self, what: str) -> str:
        return self._text(self._u64(f"the length of {what}"), what)

    def _text(self, length: int, what: str) -> str:
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _u32(self, what: str) -> int:
        number: int = _U32.unpack(self._take(4, what))[0]
        return number

    def _u64(self, what: str) -> int:
        number: int = _U64.unpack(self._take(8, what))[0]
        return number

    def _take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        if count > self.size - self.position:
            raise self._error(f"is cut off in {what}; fetch the file again")
        taken = self.view[self.position : self.position + count]
        self.position += count
        return taken

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}")


def _short(value: object) -> str:
    """A value from the file, fit for one line of an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...'"
