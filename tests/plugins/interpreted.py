"""Runs Triton kernels on the CPU: import before anything that imports triton.

With a GPU of its own a machine compiles and runs them instead; `DEVICE` says where tensors belong.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/plugins/interpreted.py: kernels would not run")
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    def _dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """A product whose rows do not depend on their places, as a matrix unit's: BLAS rounds some otherwise.

        The interpreter's own also takes bfloat16 for the integers that it keeps it as.
        """
        left, right = _floats(a), _floats(b)
        total = d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def _floats(handle: Any) -> Any:
        if handle.dtype.scalar == interpreter.tl.bfloat16:
            return (np.ascontiguousarray(handle.data).astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    interpreter.InterpreterBuilder.create_dot = _dot
