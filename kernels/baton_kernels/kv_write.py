"""Writing keys and values to their pages."""

from __future__ import annotations

import torch
from torch import Tensor

Page = tuple[int, int, int, int, int]  # layers, 2, kv_heads, block_size, head_dim


def write_rows(blocks: Tensor, offsets: Tensor, page: Page) -> Tensor:
    """Where the K and V of some tokens go in layer 0: int64 [tokens * 2 * kv_heads].

    Args:
        blocks: int64 [tokens], each token's pool slot.
        offsets: int64 [tokens], its place in the block.
        page: a block's shape.

    The numbers index the pool seen as rows of head_dim. Layer l lies `l * layer_rows(page)` further on.
    """
    layers, pair, kv_heads, block_size, _ = page
    heads = torch.arange(pair * kv_heads) * block_size
    first = blocks * (layers * layer_rows(page)) + offsets
    return (first[:, None] + heads).flatten()


def layer_rows(page: Page) -> int:
    """Rows of head_dim that one layer takes in a block."""
    _, pair, kv_heads, block_size, _ = page
    return pair * kv_heads * block_size


def kv_write(pool: Tensor, rows: Tensor, kv: Tensor) -> None:
    """Stores `kv` float32 [tokens, 2 * kv_heads, head_dim] (keys, then values) at `rows` of `pool`.

    Args:
        pool: [pool rows, head_dim] of the KV dtype: the whole pool seen as rows.
        rows: int64 [tokens * 2 * kv_heads], from `write_rows`, moved to the layer.

    What does not fit float16 is clamped and NaN becomes 0, so that a page never holds anything but finite
    numbers: attention multiplies what an earlier owner left behind its mask by zero, and 0 * inf is NaN.
    """
    stored = kv.to(pool.dtype, memory_format=torch.contiguous_format, copy=True).nan_to_num_(0.0)
    pool.index_copy_(0, rows, stored.view(-1, pool.shape[1]))
