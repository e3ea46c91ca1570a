"""Launching a kernel: one place that fixes the compiler's options, and can note what would be launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Values = Mapping[str, Any]

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(slots=True, frozen=True)
class Variant:
    """A kernel as it would be compiled for one launch."""

    kernel: Any  # triton.runtime.JITFunction
    signature: dict[str, str]  # parameter -> Triton's name of its type; constexpr ones too
    constants: dict[str, Any]
    warps: int
    stages: int

    @property
    def key(self) -> str:
        """Equal for launches that share one compiled kernel."""
        return repr((self.kernel.__name__, self.signature, self.constants, self.warps, self.stages))


_noted: ContextVar[list[Variant] | None] = ContextVar("noted", default=None)


def launch(
    kernel: Any, grid: Sequence[int], args: Values, constants: Values, *, warps: int = 4, stages: int = 1
) -> None:
    """Runs `kernel` on the current CUDA stream, or under the interpreter; an empty grid does nothing.

    `enable_fp_fusion` is always off, whatever `TRITON_DEFAULT_FP_FUSION` says: where the compiler may fuse
    a product and a sum as it likes, two kernels that do the same arithmetic give different bits.

    Args:
        args: tensors, numbers, or None for what the constants rule out.
        constants: the kernel's constexpr parameters.
    """
    noted = _noted.get()
    if noted is not None:
        noted.append(_variant(kernel, args, constants, warps, stages))
    elif all(grid):
        kernel[tuple(grid)](**args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


@contextmanager
def noting() -> Iterator[list[Variant]]:
    """Inside, launches are noted instead of run."""
    found: list[Variant] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def _variant(kernel: Any, args: Values, constants: Values, warps: int, stages: int) -> Variant:
    absent = {name: None for name, value in args.items() if value is None}
    fixed = {**absent, **constants}
    signature = {name: "constexpr" if name in fixed else _type_of(args[name]) for name in kernel.arg_names}
    return Variant(kernel, signature, fixed, warps, stages)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def power_of_two(number: int) -> int:
    """The least power of two >= `number` >= 1."""
    return 1 << (number - 1).bit_length()
