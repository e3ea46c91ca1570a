"""Padded row counts give each row of a GEMM its own bits: shapes of a real model, 1 to 600 rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton_kernels.gated import silu_mul
from baton_kernels.linear import Linear
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rows import padded

MOST = 600
SHAPES = [(576, 576), (576, 960), (1_536, 576), (576, 3_072)]  # in, out: SmolLM2 135M
FEW = [*range(1, 40), 59, 60, 61, 62, 63, 97, 119, 120, 121, 127, 128, 133, 134, 255, 256, 257, 511, 599, 600]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    rows = padded(len(x), linear.gemm)
    return linear(torch.nn.functional.pad(x, (0, 0, 0, rows - len(x))))[: len(x)]


def check(linear: Linear, counts: list[int], *, threads: tuple[int, ...] = (1, 2)) -> None:
    x = torch.randn(MOST, linear.in_features)
    torch.set_num_threads(1)
    expected = run(linear, x)
    for number in threads:
        torch.set_num_threads(number)
        for count in counts:
            chosen = torch.randperm(MOST)[:count]
            assert torch.equal(run(linear, x[chosen]), expected[chosen]), f"{count} rows, {number} threads"


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_model_shapes(shape: tuple[int, int], half: bool) -> None:
    torch.manual_seed(0)
    check(Linear(torch.randn(shape[1], shape[0]), half=half), FEW)


@pytest.mark.parametrize("half", [True, False])
def test_every_row_count(half: bool) -> None:
    torch.manual_seed(0)
    check(Linear(torch.randn(48, 128), half=half), list(range(1, MOST + 1)), threads=(2, 3))


@pytest.mark.parametrize("half", [True, False])
def test_head(half: bool) -> None:
    torch.manual_seed(0)
    check(Linear(torch.randn(49_152, 64), half=half), [1, 2, 3, 5, 7, 8, 14, 16, 31], threads=(2,))


def test_padding_is_small() -> None:
    assert all(padded(rows, "fbgemm_fp16") - rows <= 4 for rows in range(1, MOST))
    assert all(padded(rows, "blas_fp32") - rows < 24 for rows in range(1, MOST))


def test_without_padding_bits_would_change() -> None:
    """The tests above can fail: library GEMMs are not batch-invariant by themselves."""
    torch.manual_seed(0)
    for half in (True, False):
        linear = Linear(torch.randn(64, 576), half=half)
        x = torch.randn(60, 576)
        assert not all(torch.equal(linear(x[:count]), linear(x)[:count]) for count in (1, 2, 3, 7))


def test_row_operations_have_no_tails() -> None:
    """Norm and gate: the same bits at any row count and number of threads."""
    torch.manual_seed(0)
    x, weight = torch.randn(200, 302), torch.rand(302)
    torch.set_num_threads(1)
    normed, gated = rms_norm(x, weight, 1e-5), silu_mul(x)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for begin, end in ((0, 1), (3, 5), (7, 24), (100, 200), (0, 200), (199, 200)):
            part = x[begin:end].clone()
            assert torch.equal(rms_norm(part, weight, 1e-5), normed[begin:end])
            assert torch.equal(silu_mul(part), gated[begin:end])
