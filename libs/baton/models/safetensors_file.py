"""Safetensors files, single or sharded, read from memory maps.

The files are not trusted: the header is bounded, and every offset, shape and file name is checked before it
is used. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from baton.models.dequant import bfloat16_to_float32
from baton.models.errors import ModelFileError
from baton.models.jsonfile import read_json
from baton.models.mapped import map_file

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation
MAX_SHARDS = 10_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_Natural = Annotated[int, Meta(ge=0)]


class _Entry(msgspec.Struct):
    """What the header says of one tensor."""

    dtype: str
    shape: Annotated[list[_Natural], Meta(max_length=16)]
    data_offsets: tuple[_Natural, _Natural]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: `dtype` is F32, F16 or BF16; `data` its bytes, a read-only uint8 view of the map."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class SafetensorsModel:
    """The tensors of a model: one file, or the shards of an index. Nothing is read until asked for."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SafetensorsModel:
        """Map a model: a folder, an index, or one file.

        Raises:
            ModelFileError: something is missing, cut off, inconsistent, or of a type that is not read.
        """
        path = Path(path)
        if path.is_dir():
            path = _find(path)
        tensors = _read_shards(path) if path.name.endswith(".json") else read_file(path)
        return cls(path, tensors)

    def read(self, name: str) -> Floats | None:
        """A tensor's values, exactly: a new float32 array of its shape; None if there is no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.dtype == "BF16":
            values = bfloat16_to_float32(tensor.data)
        else:
            values = tensor.data.view("<f4" if tensor.dtype == "F32" else "<f2").astype(np.float32)
        return values.reshape(tensor.shape)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of its header.

    Raises:
        ModelFileError: as `SafetensorsModel.open`.
    """
    view = map_file(path)
    if len(view) < 8:
        raise ModelFileError(f"{path}: is cut off in its header; fetch the file again")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelFileError(f"{path}: is not a safetensors file (its header would take {length} bytes)")
    if length > len(view) - 8:
        raise ModelFileError(f"{path}: is cut off in its header; fetch the file again")
    entries = _parse_header(path, bytes(view[8 : 8 + length]))
    data = np.frombuffer(view, dtype=np.uint8)[8 + length :]
    _check_layout(path, entries, data.size)
    return {
        name: StoredTensor(name, entry.dtype, tuple(entry.shape), data[slice(*entry.data_offsets)])
        for name, entry in entries.items()
    }


def _parse_header(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(part, type=_Entry) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: its header is damaged: {error}") from error
    for name, entry in entries.items():
        width = _VALUE_BYTES.get(entry.dtype)
        if width is None:
            known = ", ".join(_VALUE_BYTES)
            raise ModelFileError(
                f"{path}: tensor {name!r:.120} has type {entry.dtype!r:.40}; read are {known}"
            )
        start, end = entry.data_offsets
        if end - start != math.prod(entry.shape) * width:
            raise ModelFileError(
                f"{path}: tensor {name!r:.120}: {end - start} bytes of {entry.dtype} for {entry.shape}"
            )
    return entries


def _check_layout(path: Path, entries: dict[str, _Entry], size: int) -> None:
    """Every byte of the data belongs to exactly one tensor, as the format demands."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if start != position:
            what = "overlaps another" if start < position else "leaves a hole before it"
            raise ModelFileError(f"{path}: tensor {name!r:.120} {what}")
        if end > size:
            raise ModelFileError(
                f"{path}: is cut off: tensor {name!r:.120} ends at byte {end} of {size}; fetch the file again"
            )
        position = end
    if position != size:
        raise ModelFileError(f"{path}: has {size - position} bytes that belong to no tensor")


def _find(folder: Path) -> Path:
    """The single file or the index of a model folder, the former first as in transformers."""
    for name in (SINGLE_NAME, INDEX_NAME):
        if (folder / name).exists():
            return folder / name
    raise ModelFileError(
        f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}; weights in other formats must be converted"
    )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    try:
        places = msgspec.convert(read_json(index), _Index).weight_map
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{index}: {error}") from error
    names = dict.fromkeys(places.values())
    if not 1 <= len(names) <= MAX_SHARDS:
        raise ModelFileError(f"{index}: names {len(names)} files, not 1 to {MAX_SHARDS}")
    for name in names:
        # Only a plain name: an index from elsewhere must not point outside its own folder.
        if (
            not name.endswith(".safetensors")
            or name != os.path.basename(name)
            or "\\" in name
            or "\0" in name
        ):
            raise ModelFileError(f"{index}: names the file {name!r:.120}, which is no file of this folder")
    shards = {name: read_file(index.parent / name) for name in names}
    tensors: dict[str, StoredTensor] = {}
    for name, place in places.items():
        tensor = shards[place].get(name)
        if tensor is None:
            raise ModelFileError(f"{index}: tensor {name!r:.120} is not in {place}")
        tensors[name] = tensor
    return tensors
