"""How many rows a library GEMM must be given so that each row has the same bits as in any other batch.

BLAS libraries pick other kernels for few rows or for what is left over after full tiles, and those kernels
sum in another order. Measured with torch 2.13 on AVX2: MKL float32 changes bits where 1 to 3 rows are left
over (also by its split of the rows over threads: every multiple of 4 is safe at 1 to 16 threads); FBGEMM
float16 at 1, 2, 7, 14 rows and mostly at remainders 1 and 2 of 6. Other CPUs differ, so the counts are
probed, once each, on the machine itself: all rows of a probe are equal, so all results must be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal

import torch
import xxhash
from torch import Tensor

Gemm = Literal["fbgemm_fp16", "blas_fp32", "bmm_fp32"]

# BLAS splits rows over its threads in multiples of this; a probe sees only today's number of threads.
_STEP: dict[Gemm, int] = {"fbgemm_fp16": 1, "blas_fp32": 12, "bmm_fp32": 4}
_SAFE = 60  # rows: full tiles of every kernel that we know of come first in a batch of this many
_MAX_TRIES = 64


@lru_cache(maxsize=16_384)
def padded(rows: int, gemm: Gemm) -> int:
    """The least row count >= `rows` at which `gemm` gives every row its own, fixed bits.

    Raises:
        RuntimeError: no such count within reach: this machine's BLAS cannot be made batch-invariant.
    """
    step = _STEP[gemm]
    first = -(-max(rows, 1) // step) * step
    run, expected = _probe(gemm)
    for count in range(first, first + step * _MAX_TRIES, step):
        if bool((run(count) == expected).all()):
            return count
    raise RuntimeError(f"no row count from {first} on gives {gemm} the same bits for every row")


def numerics(half: bool) -> str:
    """A name for how this machine rounds: CPU level, and a hash of what the GEMMs in use give for a probe."""
    used: tuple[Gemm, ...] = ("fbgemm_fp16" if half else "blas_fp32", "bmm_fp32")
    bits = xxhash.xxh3_64()
    for gemm in used:
        bits.update(_probe(gemm)[1].numpy().tobytes())
    return f"{torch.backends.cpu.get_cpu_capability()}-{bits.hexdigest()}"


@cache
def _probe(gemm: Gemm) -> tuple[Callable[[int], Tensor], Tensor]:
    """A function from a row count to results of equal rows [rows, out], and the result expected of each."""
    generator = torch.Generator().manual_seed(0)
    inner, outer = (64, 64) if gemm == "bmm_fp32" else (256, 256)
    weight = torch.randn(outer, inner, generator=generator)
    row = torch.randn(1, inner, generator=generator)
    if gemm == "fbgemm_fp16":
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

        def run(count: int) -> Tensor:
            return torch.ops.quantized.linear_dynamic_fp16(row.repeat(count, 1), packed)

    elif gemm == "blas_fp32":

        def run(count: int) -> Tensor:
            return torch.nn.functional.linear(row.repeat(count, 1), weight)

    else:
        batch = weight.T.repeat(3, 1, 1)

        def run(count: int) -> Tensor:
            return torch.bmm(row.repeat(3, count, 1), batch).view(3 * count, outer)

    return run, run(_SAFE)[0].clone()
