"""A sequence's full blocks as a chain of hashes, and what proves each of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.engine.block_pool import Block
from baton.engine.sequence import Sequence
from baton.kvcache.hashing import block_hash, chain
from baton.protocol.base import pack_tokens


def extend(hashes: list[int], root: int, tokens: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `tokens` that `hashes` lacks."""
    start = len(hashes) * block_size
    missing = (len(tokens) - start) // block_size
    if missing <= 0:
        return
    parent = hashes[-1] if hashes else root
    if missing == 1:
        hashes.append(block_hash(parent, pack_tokens(tokens[start : start + block_size])))
    else:
        hashes += chain(parent, np.array(tokens[start:], dtype=np.uint32), block_size).tolist()


def blocks(
    hashes: list[int], root: int, tokens: list[int], salt: str, first: int, last: int, block_size: int
) -> Iterator[Block]:
    """Full blocks `first` to `last` - 1 of `tokens`, whose hashes reach so far."""
    if first >= last:
        return
    raw = pack_tokens(np.array(tokens[first * block_size : last * block_size], dtype=np.uint32))
    width = 4 * block_size
    parent = hashes[first - 1] if first else root
    for index in range(first, last):
        at = (index - first) * width
        yield Block(hashes[index], parent, raw[at : at + width], salt)
        parent = hashes[index]


def of(seq: Sequence, first: int, last: int, block_size: int) -> Iterator[Block]:
    """Full blocks `first` to `last` - 1 of a sequence."""
    return blocks(seq.hashes, seq.root, seq.tokens, seq.salt, first, last, block_size)
