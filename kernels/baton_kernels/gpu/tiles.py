"""The tile configurations that linear layers may have: few, all of which compile everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton_kernels.gpu.quantise import WeightFormat


@dataclass(slots=True, frozen=True)
class Tiles:
    """How a product is cut: rows, columns and depth of a tile."""

    rows: int = 64
    columns: int = 64
    depth: int = 64  # a multiple of 32
    warps: int = 4
    stages: int = 3


_WIDE = (
    Tiles(),
    Tiles(64, 32, 128, 4, 3),
    Tiles(64, 64, 128, 4, 3),
    Tiles(64, 128, 64, 4, 3),
    Tiles(128, 128, 64, 8, 3),
)
_EXACT = (Tiles(32, 32, 32, 4, 2), Tiles(64, 64, 32, 4, 2))  # float32: no matrix unit keeps all its bits


def candidates(dtype: torch.dtype, format: WeightFormat) -> tuple[Tiles, ...]:
    """What tuning tries for activations of `dtype` and weights in `format`; the first is the default."""
    if dtype == torch.float32:
        return _EXACT
    return _WIDE if format != "int4" else _WIDE[:3]
