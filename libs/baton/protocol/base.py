"""The shape every message shares, and the packing of token ids and hashes.

Messages are `msgspec` structs in MessagePack. Fields are only ever added, with a default: an older
reader ignores what it does not know, a newer one fills in what is missing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="t", tag=True):
    """A message that crosses a process. On the wire: a map with its class name under `t`."""


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A named piece inside a message. On the wire: a map."""


class Row(msgspec.Struct, array_like=True, omit_defaults=False):
    """A piece that is sent every step. On the wire: an array, so fields are added at the end only."""


TokenIds = npt.NDArray[np.uint32]
BlockHashes = npt.NDArray[np.uint64]


def pack_tokens(tokens: Iterable[int] | TokenIds) -> bytes:
    """Token ids as raw little-endian uint32.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
    """
    if not isinstance(tokens, np.ndarray):
        packed = array("I", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
    return tokens.astype("<u4", copy=False).tobytes()


def unpack_tokens(raw: bytes) -> TokenIds:
    """The inverse of `pack_tokens`: a read-only uint32 array [n].

    Raises:
        msgspec.ValidationError: the bytes are not a whole number of ids.
    """
    if len(raw) % 4:
        raise msgspec.ValidationError(f"token ids take 4 bytes each, got {len(raw)} bytes")
    return np.frombuffer(raw, dtype="<u4")


def token_list(raw: bytes) -> list[int]:
    """As `unpack_tokens`, for the few tokens of a step: a list, several times as quick.

    Raises:
        msgspec.ValidationError: the bytes are not a whole number of ids.
    """
    if len(raw) == 4:
        return [int.from_bytes(raw, "little")]
    return unpack_tokens(raw).tolist()


def pack_hashes(hashes: Iterable[int] | BlockHashes) -> bytes:
    """Block hashes as raw little-endian uint64."""
    if not isinstance(hashes, np.ndarray):
        hashes = np.fromiter(hashes, dtype=np.uint64)
    return hashes.astype("<u8", copy=False).tobytes()


def unpack_hashes(raw: bytes) -> BlockHashes:
    """The inverse of `pack_hashes`: a read-only uint64 array [n].

    Raises:
        msgspec.ValidationError: the bytes are not a whole number of hashes.
    """
    if len(raw) % 8:
        raise msgspec.ValidationError(f"block hashes take 8 bytes each, got {len(raw)} bytes")
    return np.frombuffer(raw, dtype="<u8")
