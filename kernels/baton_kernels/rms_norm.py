"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    x float32 [rows, hidden], weight float32 [hidden]; a new float32 tensor of x's shape.
    """
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `update` to `residual` in place, and returns the norm of the sum. Shapes as in `rms_norm`."""
    return rms_norm(residual.add_(update), weight, eps)
