"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [vocab, hidden] (float16 or float32) for `ids` int64 [rows]: float32 [rows, hidden]."""
    return torch.index_select(table, 0, ids).float()
