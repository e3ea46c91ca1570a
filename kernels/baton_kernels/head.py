"""Logits head: only for the rows that are sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.linear import Linear
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rows import padded


def logits(hidden: Tensor, rows: Tensor, norm: Tensor, eps: float, head: Linear, vocab: int) -> Tensor:
    """Final norm and head of some rows: float32 [n, vocab_rows]; ids from `vocab` on are -inf.

    Args:
        hidden: float32 [all rows, hidden].
        rows: int64 [n], which of them.
        norm: float32 [hidden], the final norm's weight.
        head: hidden -> vocab_rows; `vocab` of its rows stand for real tokens, the rest are padding.
    """
    count = rows.numel()
    picked = hidden.new_zeros(padded(count, head.gemm), hidden.shape[1])
    torch.index_select(hidden, 0, rows, out=picked[:count])
    result = head(rms_norm(picked, norm, eps))[:count]
    if vocab < result.shape[1]:
        result[:, vocab:] = float("-inf")
    return result
