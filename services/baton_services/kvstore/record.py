"""A block as a value in Redis: a bounded MessagePack header, then the block's bytes.

    "BKV1"  uint32 header length  {parent, tokens, checksum, block_bytes}  bytes

Whoever can write to Redis can put anything there, so a value is believed only as far as it proves itself: its
size, its checksum, and that parent and tokens hash to the key's hash.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgpack
import msgspec
from msgspec import Meta

from baton.kvcache.hashing import block_hash
from baton.kvcache.pool import checksum
from baton_services.kvstore.ram import Entry, Key

MAGIC = b"BKV1"
MAX_HEADER = 8 * 1_024
MAX_TOKEN_BYTES = 4_096
MAX_BLOCK_BYTES = 64 * 1_024 * 1_024
MAX_VALUE = len(MAGIC) + 4 + MAX_HEADER + MAX_BLOCK_BYTES

_LENGTH = struct.Struct("<I")
_Unsigned64 = Annotated[int, Meta(ge=0)]


class Header(msgspec.Struct):
    parent: _Unsigned64
    tokens: Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]
    checksum: _Unsigned64
    block_bytes: Annotated[int, Meta(gt=0, le=MAX_BLOCK_BYTES)]


class BadRecord(ValueError):
    """A value that is not the block its key names."""


def pack(entry: Entry) -> bytes:
    """The value for a block."""
    fields = {
        "parent": entry.parent,
        "tokens": entry.tokens,
        "checksum": entry.checksum,
        "block_bytes": len(entry.data),
    }
    header: bytes = msgpack.packb(fields)
    return b"".join((MAGIC, _LENGTH.pack(len(header)), header, entry.data))


def unpack(value: bytes, key: Key) -> Entry:
    """The block in `value`, proven to be `key`'s.

    Raises:
        BadRecord: it is cut short, damaged, or another block.
    """
    start = len(MAGIC) + _LENGTH.size
    if len(value) < start or not value.startswith(MAGIC):
        raise BadRecord("not a block")
    (length,) = _LENGTH.unpack_from(value, len(MAGIC))
    if length > MAX_HEADER:
        raise BadRecord(f"a header of {length} bytes")
    try:
        plain = msgpack.unpackb(value[start : start + length], max_map_len=16, max_bin_len=MAX_TOKEN_BYTES)
        header = msgspec.convert(plain, Header)
        found = block_hash(header.parent, header.tokens)
    except (ValueError, OverflowError, msgpack.UnpackException, msgspec.ValidationError) as error:
        raise BadRecord(str(error)) from error
    data = value[start + length :]
    if len(data) != header.block_bytes:
        raise BadRecord(f"{len(data)} bytes of {header.block_bytes}")
    if found != key[1]:
        raise BadRecord("another block's tokens")
    if checksum(data) != header.checksum:
        raise BadRecord("damaged")
    return Entry(key, header.parent, header.tokens, header.checksum, data)
