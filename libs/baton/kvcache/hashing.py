"""Block hashes: XXH3-64 over the parent's hash and the block's own token ids, chained from a salted root.

    root_hash(fingerprint, salt) -> block 0 -> block 1 -> ...

A hash finds a block; whoever reuses one compares parent and tokens first. Endianness is fixed, so equal
prompts have equal hashes on every machine.
"""

from __future__ import annotations

import numpy as np
import xxhash

from baton.protocol.base import BlockHashes, TokenIds

_TOKEN = np.dtype("<u4")


def root_hash(fingerprint: str, salt: str = "") -> int:
    """The parent of a sequence's first block.

    `salt` holds what must never share blocks with others (adapter, `cache_salt`). The fingerprint's length is
    hashed with it, so that no pair of fingerprint and salt reads as another pair.
    """
    kind = fingerprint.encode()
    return xxhash.xxh3_64_intdigest(
        len(kind).to_bytes(4, "little") + kind + salt.encode(errors="surrogatepass")
    )


def block_hash(parent: int, tokens: bytes) -> int:
    """The hash of one block: `parent` as 8 bytes, then `tokens` as packed by `pack_tokens`; little-endian."""
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + tokens)


def chain(parent: int, tokens: TokenIds, block_size: int) -> BlockHashes:
    """Hashes of the full blocks in `tokens`.

    Args:
        parent: the root's hash, or the hash of the block before `tokens`.
        tokens: uint32 [n]; a last part shorter than `block_size` is left out.

    Returns:
        uint64 [n // block_size].
    """
    raw = tokens.astype(_TOKEN, copy=False).tobytes()
    width = block_size * _TOKEN.itemsize
    hashes = np.empty(len(tokens) // block_size, dtype=np.uint64)
    for index in range(len(hashes)):
        parent = block_hash(parent, raw[index * width : (index + 1) * width])
        hashes[index] = parent
    return hashes
