"""Linear layers against float64, in every format; and the same bits whatever rows are beside a row."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.gpu.linear import linear
from baton_kernels.gpu.quantise import Weight, WeightFormat, quantise
from baton_kernels.gpu.tiles import Tiles
from baton_kernels.reference import operations

CLOSE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
SMALL = Tiles(32, 32, 32)


def run(x: torch.Tensor, weight: Weight, tiles: Tiles, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), weight.shape[0]), -7.0, device=x.device)
    linear(x, weight, out, tiles, bias=bias)
    return out


@pytest.mark.parametrize(
    ("dtype", "format", "group", "rows", "columns", "inner", "tiles", "with_bias"),
    [
        (torch.float32, "plain", 32, 5, 70, 97, SMALL, True),
        (torch.float16, "plain", 32, 70, 33, 200, Tiles(), False),
        (torch.bfloat16, "plain", 32, 1, 130, 64, Tiles(16, 64, 32), True),
        (torch.float16, "int8", 32, 3, 65, 96, SMALL, True),
        (torch.bfloat16, "int8", 32, 40, 40, 130, Tiles(), False),
        (torch.float32, "int8", 32, 2, 17, 33, SMALL, False),
        (torch.float16, "fp8", 32, 9, 48, 100, SMALL, False),
        (torch.bfloat16, "fp8", 32, 2, 31, 64, Tiles(), True),
        (torch.float32, "fp8", 32, 33, 64, 70, SMALL, True),
        (torch.float16, "int4", 32, 4, 50, 96, SMALL, True),
        (torch.bfloat16, "int4", 64, 35, 33, 192, Tiles(), False),
        (torch.float32, "int4", 128, 1, 20, 256, Tiles(16, 32, 64), True),
    ],
)
def test_linear(
    dtype: torch.dtype, format: WeightFormat, group: int, rows: int, columns: int, inner: int, tiles: Tiles,
    with_bias: bool, device: str,
) -> None:  # fmt: skip
    matrix = (torch.randn(columns, inner, device=device) * inner**-0.5).to(dtype)
    weight = quantise(matrix, format, group)
    assert weight.shape == (columns, inner)
    x = torch.randn(rows, inner, device=device).to(dtype)
    bias = torch.randn(columns, device=device) if with_bias else None
    got = run(x, weight, tiles, bias)
    exact = operations.linear(x, weight.dequantised(), bias)
    close = CLOSE[dtype]
    torch.testing.assert_close(got.double(), exact, atol=4 * close, rtol=close)


@pytest.mark.parametrize(("format", "largest"), [("int8", 0.012), ("fp8", 0.04), ("int4", 0.09)])
def test_what_quantising_costs(format: WeightFormat, largest: float) -> None:
    matrix = torch.randn(16, 256)
    error = (quantise(matrix, format).dequantised() - matrix).norm() / matrix.norm()
    assert 0 < float(error) < largest


def test_int4_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="100 columns, group 32"):
        quantise(torch.randn(4, 100), "int4")


@pytest.mark.parametrize("format", ["plain", "int8", "int4", "fp8"])
def test_the_same_row_has_the_same_bits(format: WeightFormat, device: str) -> None:
    weight = quantise((torch.randn(40, 96, device=device) * 0.1).half(), format)
    x = torch.randn(75, 96, device=device).half()
    whole = run(x, weight, SMALL)
    for count in (1, 2, 31, 33, 64):
        chosen = torch.randperm(75)[:count]
        assert torch.equal(run(x[chosen], weight, SMALL), whole[chosen])
    strided = torch.zeros(75, 200, device=device).half()
    strided[:, :96] = x
    assert torch.equal(run(strided[:, :96], weight, SMALL), whole)


def test_a_broken_row_breaks_no_other(device: str) -> None:
    weight = quantise(torch.randn(40, 96, device=device).half(), "plain")
    x = torch.randn(5, 96, device=device).half()
    expected = run(x, weight, SMALL)
    x[2] = float("nan")
    got = run(x, weight, SMALL)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], expected[others])
