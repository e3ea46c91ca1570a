"""Rotary position embedding, halves rotated as in Hugging Face's Llama (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class RopeTable:
    """Cosines and sines by position: float64 inside, float32 rows out, grown as positions are asked for."""

    def __init__(self, inverse_frequencies: npt.NDArray[np.float64], factor: float = 1.0) -> None:
        """
        Args:
            inverse_frequencies: float64 [head_dim / 2], radians a position, scaling already applied.
            factor: multiplies cosines and sines (YaRN's attention factor).
        """
        self._frequencies = np.asarray(inverse_frequencies, dtype=np.float64)
        self._factor = factor
        self._cos = torch.empty(0, 0)
        self._sin = torch.empty(0, 0)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, float32 [rows, 1, head_dim] each, of `positions` int64 [rows].

        cos is (c, c) and sin (-s, s), so that a rotation is `x * cos + swap_halves(x) * sin`.
        """
        highest = int(positions.max())
        if highest >= len(self._cos):
            self._grow(max(highest + 1, 2 * len(self._cos), 2_048))
        cos = self._cos.index_select(0, positions).unsqueeze(1)
        return cos, self._sin.index_select(0, positions).unsqueeze(1)

    def _grow(self, length: int) -> None:
        angles = np.arange(length, dtype=np.float64)[:, None] * self._frequencies
        cos, sin = np.cos(angles) * self._factor, np.sin(angles) * self._factor
        self._cos = torch.from_numpy(np.concatenate([cos, cos], axis=1).astype(np.float32))
        self._sin = torch.from_numpy(np.concatenate([-sin, sin], axis=1).astype(np.float32))


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` float32 [rows, heads, head_dim] in place, and returns it.

    `cos` and `sin` are from `RopeTable.rows`. Multiply and add stay apart: a fused one would round
    differently in vector tails.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1).mul_(sin)
    return x.mul_(cos).add_(swapped)
