"""Linear layers: float16 weights with float32 activations by FBGEMM, or float32 throughout by BLAS."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from baton_kernels.rows import Gemm


class Linear:
    """`x @ weight.T + bias`, the weight packed once.

    x is float32 [rows, in] contiguous, the result float32 [rows, out]. Row counts must come from
    `rows.padded(n, linear.gemm)`; only then are a row's bits its own.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, half: bool) -> None:
        """
        Args:
            weight: float32 [out, in]. With `half` it is rounded to float16 and not kept.
            bias: float32 [out], or None.
            half: pack for FBGEMM's float16 path; `has_half_path()` must hold.
        """
        self.out_features, self.in_features = weight.shape
        self.gemm: Gemm = "fbgemm_fp16" if half else "blas_fp32"
        self._packed: Any = None
        self._weight: Tensor | None = None
        self._bias = bias
        if half:
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight is None:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return torch.nn.functional.linear(x, self._weight, self._bias)


@cache
def has_half_path() -> bool:
    """Whether this torch build and CPU have FBGEMM's float16 GEMM (x86-64 with AVX2)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(8, 8), None)
        return bool((torch.ops.quantized.linear_dynamic_fp16(torch.ones(3, 8), packed) == 8).all())
    except RuntimeError:
        return False
