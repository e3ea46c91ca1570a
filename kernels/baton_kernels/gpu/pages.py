"""A KV pool in device memory as the kernels see it.

A block is [layers, 2, kv_heads, block_size, head_dim] values, keys before values. With 8 bits a value, a
float32 scale for each token and head follows: [layers, 2, kv_heads, block_size], so that it moves with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KvFormat = Literal["float32", "float16", "bfloat16", "int8", "fp8"]

STORED: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.uint8,
}


@dataclass(slots=True, frozen=True)
class PageShape:
    """The shape of a block."""

    layers: int
    kv_heads: int
    block_size: int  # tokens
    head_dim: int
    format: KvFormat

    @property
    def scaled(self) -> bool:
        """Whether a scale a token and head goes with the values."""
        return STORED[self.format].itemsize == 1

    @property
    def vectors(self) -> int:
        """Keys and values of one head and token, in a block."""
        return self.layers * 2 * self.kv_heads * self.block_size

    @property
    def value_bytes(self) -> int:
        return self.vectors * self.head_dim * STORED[self.format].itemsize

    @property
    def block_bytes(self) -> int:
        return self.value_bytes + (self.vectors * 4 if self.scaled else 0)


class Pages:
    """A pool and views of it, no copy.

    Attributes:
        raw: uint8 [blocks, block_bytes].
        values: [blocks * block_values], the stored type: block b begins at b * `block_values`.
        scales: float32, block b's begin at b * `block_floats` + `first_scale`; None where there are none.
    """

    def __init__(self, raw: Tensor, shape: PageShape) -> None:
        """
        Raises:
            ValueError: blocks of another size than the shape's, or one that float32 scales cannot lie in.
        """
        if raw.shape[1] != shape.block_bytes:
            raise ValueError(f"the pool has blocks of {raw.shape[1]} bytes, the model {shape.block_bytes}")
        if shape.scaled and shape.value_bytes % 4:
            raise ValueError(f"8-bit KV of {shape.head_dim} dimensions leaves its scales unaligned")
        self.raw = raw
        self.shape = shape
        stored = STORED[shape.format]
        self.values = raw.view(-1).view(stored)
        self.block_values = shape.block_bytes // stored.itemsize
        self.scales: Tensor | None = raw.view(-1).view(torch.float32) if shape.scaled else None
        self.block_floats = shape.block_bytes // 4
        self.first_scale = shape.value_bytes // 4
