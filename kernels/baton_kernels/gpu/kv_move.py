"""Moving KV blocks: lists of blocks to and from one buffer, with a checksum; pages of another shape.

A pull is then one launch and one copy, however the blocks lie in the pool.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gpu.launch import launch, power_of_two
from baton_kernels.gpu.pages import Pages

WORDS = 4_096  # of 4 bytes, that a program moves
_MIX: tl.constexpr = tl.constexpr(-1_640_531_535)  # 0x9E3779B1, odd: different places, different words
_SPREAD: tl.constexpr = tl.constexpr(-2_048_144_789)  # 0x85EBCA6B


@triton.jit
def _mixed(words, at):
    """A word and its place in the block, hashed: int64, not negative. A block's sum is its checksum."""
    mixed = (words ^ (at * _MIX)) * _SPREAD
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * _MIX
    mixed = mixed ^ ((mixed >> 13) & 0x7FFFF)
    return mixed.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _move_blocks(
    pool, staging, slots, sums, words, WORDS: tl.constexpr, OUT: tl.constexpr, SUM: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = at < words
    in_pool = pool + tl.load(slots + block).to(tl.int64) * words + at
    in_staging = staging + block * words + at
    if OUT:
        moved = tl.load(in_pool, mask=inside, other=0)
        tl.store(in_staging, moved, mask=inside)
    else:
        moved = tl.load(in_staging, mask=inside, other=0)
        tl.store(in_pool, moved, mask=inside)
    if SUM:
        tl.atomic_add(sums + block, tl.sum(tl.where(inside, _mixed(moved, at), 0), 0))


def gather_blocks(pages: Pages, slots: Tensor, staging: Tensor, sums: Tensor | None = None) -> None:
    """Copies blocks `slots` int32 [n] of the pool to `staging` uint8 [n, block_bytes], contiguous.

    `sums` int64 [n] must be zero; each block's checksum is added to it. Sums of integers: exact in any order.
    """
    _move(pages, slots, staging, sums, out=True)


def scatter_blocks(pages: Pages, slots: Tensor, staging: Tensor, sums: Tensor | None = None) -> None:
    """The other way: from `staging` to the pool. No slot twice; the rest as in `gather_blocks`."""
    _move(pages, slots, staging, sums, out=False)


def checksum(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """What the kernels add to `sums`, for uint8 [n, block_bytes] in host memory: int64 [n]."""
    words = np.ascontiguousarray(blocks).view(np.uint32)
    mixed = (words ^ (np.arange(words.shape[1], dtype=np.uint32) * np.uint32(0x9E3779B1))) * np.uint32(
        0x85EBCA6B
    )
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x9E3779B1)
    mixed ^= mixed >> np.uint32(13)
    return mixed.sum(axis=1, dtype=np.int64)


def _move(pages: Pages, slots: Tensor, staging: Tensor, sums: Tensor | None, *, out: bool) -> None:
    size = pages.shape.block_bytes
    if size % 4:
        raise ValueError(f"blocks of {size} bytes cannot be moved by words of 4")
    args = {
        "pool": pages.raw.view(-1).view(torch.int32), "staging": staging.view(-1).view(torch.int32),
        "slots": slots, "sums": sums, "words": size // 4,
    }  # fmt: skip
    constants = {"WORDS": WORDS, "OUT": out, "SUM": sums is not None}
    launch(_move_blocks, (len(slots), triton.cdiv(size // 4, WORDS)), args, constants, warps=8)


@triton.jit
def _reshape_pages(
    source, source_scales, source_table, target, target_scales, target_table,
    source_size, target_size, source_heads, target_heads, first_source, first_target, head_dim,
    source_values, source_floats, source_first, target_values, target_floats, target_first,
    BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    token, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, BLOCK)
    inside = lane < head_dim
    slot = tl.load(source_table + token // source_size).to(tl.int64)
    vector = (part * source_heads + first_source + head) * source_size + token % source_size
    to_slot = tl.load(target_table + token // target_size).to(tl.int64)
    to_vector = (part * target_heads + first_target + head) * target_size + token % target_size
    at = slot * source_values + vector.to(tl.int64) * head_dim + lane
    to = to_slot * target_values + to_vector.to(tl.int64) * head_dim + lane
    tl.store(target + to, tl.load(source + at, mask=inside, other=0), mask=inside)
    if SCALED:
        scale = tl.load(source_scales + slot * source_floats + source_first + vector)
        tl.store(target_scales + to_slot * target_floats + target_first + to_vector, scale)


def reshape_pages(
    source: Pages, source_table: Tensor, target: Pages, target_table: Tensor, tokens: int, *,
    heads: int, first_source: int = 0, first_target: int = 0,
) -> None:  # fmt: skip
    """Copies a sequence's first `tokens` tokens between pools of other block sizes or shares of the heads.

    Args:
        source_table, target_table: int32, the sequence's blocks in each pool.
        heads: KV heads to copy, from `first_source` on, to `first_target` on: a tensor-parallel share.

    Raises:
        ValueError: the pools differ in layers, head size or format.
    """
    one, other = source.shape, target.shape
    if (one.layers, one.head_dim, one.format) != (other.layers, other.head_dim, other.format):
        raise ValueError(f"blocks of {one} cannot become blocks of {other}")
    args = {
        "source": source.values, "source_scales": source.scales, "source_table": source_table,
        "target": target.values, "target_scales": target.scales, "target_table": target_table,
        "source_size": one.block_size, "target_size": other.block_size,
        "source_heads": one.kv_heads, "target_heads": other.kv_heads,
        "first_source": first_source, "first_target": first_target, "head_dim": one.head_dim,
        "source_values": source.block_values, "source_floats": source.block_floats,
        "source_first": source.first_scale, "target_values": target.block_values,
        "target_floats": target.block_floats, "target_first": target.first_scale,
    }  # fmt: skip
    constants = {"BLOCK": power_of_two(one.head_dim), "SCALED": one.scaled}
    launch(_reshape_pages, (tokens, one.layers * 2, heads), args, constants, warps=1)
