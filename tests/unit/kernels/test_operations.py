"""Each operation against its plain reference in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton_kernels.attention_plan import Span, plan_attention
from baton_kernels.embedding import embedding
from baton_kernels.gated import silu_mul
from baton_kernels.head import logits
from baton_kernels.kv_write import kv_write, layer_rows, write_rows
from baton_kernels.linear import Linear, has_half_path
from baton_kernels.paged_attention import paged_attention
from baton_kernels.reference import operations
from baton_kernels.rms_norm import add_rms_norm, rms_norm
from baton_kernels.rope import RopeTable, rope_

EXACT = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got.double(), expected.double(), **(tolerance or EXACT))


def test_rms_norm() -> None:
    x, update, weight = torch.randn(7, 96) * 3, torch.randn(7, 96), torch.rand(96)
    close(rms_norm(x, weight, 1e-5), operations.rms_norm(x, weight, 1e-5))
    residual = x.clone()
    close(add_rms_norm(residual, update, weight, 1e-5), operations.rms_norm(x + update, weight, 1e-5))
    assert torch.equal(residual, x + update)


@pytest.mark.parametrize("positions", [[0, 1, 2], [5_000, 7, 1_999]])
def test_rope(positions: list[int]) -> None:
    frequencies = 10_000.0 ** -(np.arange(0, 32, 2) / 32)
    table = RopeTable(frequencies, 1.25)
    at = torch.tensor(positions)
    x = torch.randn(3, 5, 32)
    expected = operations.rope(x, at, torch.from_numpy(frequencies), 1.25)
    close(rope_(x, *table.rows(at)), expected)
    assert table.rows(torch.tensor([20_000]))[0].shape == (1, 1, 32)  # grows


def test_silu_mul() -> None:
    x = torch.randn(9, 300) * 20
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])  # exp overflows, and must not give NaN
    close(silu_mul(x), operations.silu_mul(*x.chunk(2, -1)))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(half: bool, with_bias: bool) -> None:
    assert has_half_path() or not half
    weight, x = torch.randn(70, 96), torch.randn(12, 96)
    bias = torch.randn(70) if with_bias else None
    rounded = weight.half().float() if half else weight
    close(Linear(weight, bias, half=half)(x), operations.linear(x, rounded, bias), atol=1e-4, rtol=1e-5)


def test_embedding_and_head() -> None:
    table = torch.randn(40, 24)
    assert torch.equal(embedding(torch.tensor([3, 39, 3]), table.half()), table.half().float()[[3, 39, 3]])
    hidden, norm = torch.randn(9, 24), torch.rand(24)
    got = logits(hidden, torch.tensor([8, 2]), norm, 1e-5, Linear(table, half=False), 33)
    expected = operations.linear(operations.rms_norm(hidden[[8, 2]], norm, 1e-5), table)
    close(got[:, :33], expected[:, :33])
    assert torch.isneginf(got[:, 33:]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (4, 4, 24), (8, 1, 64)])
@pytest.mark.parametrize("block_size", [8, 64])
def test_paged_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """A step of decodes and chunks over scattered pages of the second of two layers, beside stale data."""
    page = (2, 2, kv_heads, block_size, head_dim)
    pieces = [(0, 1), (63, 1), (64, 1), (700, 1), (0, 5), (60, 80), (0, 129), (333, 200)]  # start, length
    storage = torch.full((400 * 2 * 2 * kv_heads * block_size * head_dim,), 60_000.0, dtype=dtype)
    slots = list(range(400))
    random.Random(1).shuffle(slots)
    spans, expected, row = [], [], 0
    queries = torch.randn(sum(length for _, length in pieces), heads, head_dim)
    for start, length in pieces:
        known = start + length
        blocks = [slots.pop() for _ in range(-(-known // block_size))]
        kv = torch.randn(known, 2 * kv_heads, head_dim).to(dtype).float()
        at = torch.arange(known)
        rows = write_rows(torch.tensor(blocks)[at // block_size], at % block_size, page)
        kv_write(storage.view(-1, head_dim), rows + layer_rows(page), kv)
        spans.append(Span(row, length, start, blocks))
        mine = queries[row : row + length]
        expected.append(operations.attention(mine, kv[:, :kv_heads], kv[:, kv_heads:], start))
        row += length
    out = torch.full((row + 2, heads * head_dim), -7.0)
    pool = storage.view(-1, page[1] * kv_heads * block_size * head_dim)
    paged_attention(queries, pool, 1, page, plan_attention(spans, page, heads // kv_heads), out)
    close(out[:row], torch.cat(expected))
    assert (out[row:] == -7.0).all()


def test_pages_hold_only_finite_numbers() -> None:
    page = (1, 2, 1, 8, 4)
    storage = torch.zeros(2 * 64, dtype=torch.float16)
    kv = torch.tensor([float("nan"), float("inf"), -1e30, 70_000.0]).repeat(1, 2, 1)
    rows = write_rows(torch.tensor([1]), torch.tensor([3]), page)
    kv_write(storage.view(-1, 4), rows, kv)
    keys, values = storage.view(2, 1, 2, 1, 8, 4)[1, 0, :, 0]
    assert keys[3].tolist() == values[3].tolist() == [0.0, 65_504.0, -65_504.0, 65_504.0]
    assert storage.count_nonzero() == 6
