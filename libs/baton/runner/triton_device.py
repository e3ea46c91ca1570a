"""Where the GPU kernels can run, and what to do where they cannot. Light: torch and triton come late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OLDEST = (8, 0)  # compute capability: bfloat16 in the matrix units
INSTEAD = "or use --engine native"


class GpuUnusable(RuntimeError):
    """Why the GPU engine cannot run here, in one line that names the fix."""


def gpu_visible() -> bool:
    """Whether a driver shows this process an NVIDIA GPU; loads nothing."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen not in ("", "-1") and bool(glob("/dev/nvidia[0-9]*") or glob("/dev/dxg"))


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU: for tests, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def open_device() -> torch.device:
    """The device that kernels run on, tried out with one of them.

    Raises:
        GpuUnusable: no GPU, one that is too old, or a Triton that is missing or does not work.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise GpuUnusable(
            f"Triton is missing ({error}): pip install 'baton-serve[gpu]', {INSTEAD}"
        ) from error
    import torch

    if interpreting():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        fix = "check the driver with nvidia-smi" if built else "install a CUDA build of torch"
        raise GpuUnusable(f"torch {torch.__version__} finds no NVIDIA GPU: {fix}, {INSTEAD}")
    found = torch.cuda.get_device_capability()
    if found < OLDEST:
        name = torch.cuda.get_device_name()
        raise GpuUnusable(
            f"{name} has compute capability {found[0]}.{found[1]}; the GPU engine needs "
            f"{OLDEST[0]}.{OLDEST[1]} (Ampere) or newer: take another GPU, {INSTEAD}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    try_out(device)
    return device


def try_out(device: torch.device) -> None:
    """Runs one kernel and looks at what it gives.

    Raises:
        GpuUnusable: it does not compile, does not run, or computes something else.
    """
    import torch

    from baton_kernels.gpu.gather import gather_rows

    table = torch.arange(64, dtype=torch.float32, device=device).view(4, 16)
    out = torch.zeros(2, 16, device=device)
    try:
        gather_rows(table, torch.tensor([3, 1], dtype=torch.int32, device=device), out)
        right = torch.equal(out, table[[3, 1]])
    except Exception as error:  # whatever compiler, driver or loader say
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise GpuUnusable(
            f"Triton cannot run a kernel here ({told}): reinstall the triton that this torch asks for, "
            f"see that a C compiler is on the PATH, {INSTEAD}"
        ) from error
    if not right:
        raise GpuUnusable(
            f"Triton computes wrongly here: reinstall the triton that this torch asks for, {INSTEAD}"
        )


def ensure_memory(device: torch.device, needed: int, kv_memory_mb: int) -> None:
    """
    Raises:
        GpuUnusable: weights and pool of `needed` bytes do not fit.
    """
    if device.type != "cuda":
        return
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise GpuUnusable(
            f"{needed >> 20} MB of GPU memory are needed, {free >> 20} MB are free: {_smaller(kv_memory_mb)}"
        )


@contextmanager
def told_when_full(kv_memory_mb: int) -> Iterator[None]:
    """Turns torch's words for "out of memory" into ours: another process may take what was free before.

    Raises:
        GpuUnusable: an allocation failed.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition(". ")[0]
        raise GpuUnusable(f"{first}: {_smaller(kv_memory_mb)}") from error


def _smaller(kv_memory_mb: int) -> str:
    return f"lower --worker-kv-memory-mb {kv_memory_mb}, use --dtype int8 or int4, {INSTEAD}"
