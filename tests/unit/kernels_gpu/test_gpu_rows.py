"""Kernels that work row by row: norm, gate, gather, RoPE with the write to pages."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.models.rope import Rope, inverse_frequencies
from baton_kernels.gpu.gated import silu_mul
from baton_kernels.gpu.gather import gather_rows
from baton_kernels.gpu.pages import Pages, PageShape
from baton_kernels.gpu.rms_norm import rms_norm
from baton_kernels.gpu.rope_write import rope_write
from baton_kernels.reference import operations

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# What rounding a result of size 1 to the type may change.
STEP = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.double().cpu(), expected.double().cpu(), atol=4 * STEP[dtype], rtol=2 * STEP[dtype]
    )


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden"),
    [(torch.float32, 7, 96), (torch.float16, 1, 4_096), (torch.bfloat16, 5, 577), (torch.float32, 3, 16)],
)
def test_rms_norm(dtype: torch.dtype, rows: int, hidden: int, device: str) -> None:
    x, update = (
        torch.randn(rows, hidden, device=device) * 3,
        torch.randn(rows, hidden, device=device).to(dtype),
    )
    weight = torch.rand(hidden, device=device)
    out = torch.empty(rows, hidden, dtype=dtype, device=device)
    rms_norm(x, weight, 1e-5, out)
    near(out, operations.rms_norm(x, weight, 1e-5), dtype)
    residual = x.clone()
    rms_norm(residual, weight, 1e-5, out, update=update)
    assert torch.equal(residual, x + update.float())
    near(out, operations.rms_norm(residual, weight, 1e-5), dtype)
    picked = torch.tensor([rows - 1, 0, rows - 1], dtype=torch.int32, device=device)
    few = torch.empty(3, hidden, dtype=dtype, device=device)
    rms_norm(x, weight, 1e-5, few, picked=picked)
    near(few, operations.rms_norm(x[picked.long()], weight, 1e-5), dtype)


def test_rms_norm_of_a_rounded_residual(device: str) -> None:
    x, update = (torch.randn(4, 64, device=device).half() for _ in range(2))
    expected = x + update
    out = torch.empty(4, 64, device=device)
    rms_norm(x, torch.ones(64, device=device), 1e-6, out, update=update)
    assert torch.equal(x, expected)
    near(out, operations.rms_norm(expected, torch.ones(64, device=device), 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ffn", [300, 1_024, 1_500])
def test_silu_mul(dtype: torch.dtype, ffn: int, device: str) -> None:
    x = torch.randn(3, 2 * ffn, device=device) * 10
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])  # exp overflows, and must not give NaN
    x = x.to(dtype)
    out = torch.full((4, ffn), -7.0, dtype=dtype, device=device)
    silu_mul(x, out[:3])
    near(out[:3], operations.silu_mul(*x.chunk(2, -1)), dtype)
    assert (out[3] == -7).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_gather_rows(dtype: torch.dtype, device: str) -> None:
    table = torch.randn(40, 1_100, device=device).to(dtype)
    ids = torch.tensor([3, 39, 3], dtype=torch.int32, device=device)
    out = torch.empty(3, 1_100, device=device)
    gather_rows(table, ids, out)
    assert torch.equal(out, table[ids.long()].float())


SCALINGS = {
    "default": Rope(dimensions=64, theta=10_000.0),
    "linear": Rope(dimensions=80, theta=10_000.0, kind="linear", factor=4.0),
    "llama3": Rope(
        dimensions=128,
        theta=500_000.0,
        kind="llama3",
        factor=8.0,
        original_context=8_192,
        low_freq_factor=1.0,
    ),
    "yarn": Rope(
        dimensions=64, theta=10_000.0, kind="yarn", factor=4.0, original_context=512, attention_factor=1.14
    ),
    "factors": Rope(
        dimensions=96, theta=10_000.0, kind="factors", factors=tuple(1 + i / 8 for i in range(48))
    ),
}


def tables(rope: Rope, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies, factor = inverse_frequencies(rope)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    both = (np.cos(angles) * factor, np.sin(angles) * factor)
    cos, sin = (torch.from_numpy(part.astype(np.float32)).to(device) for part in both)
    return cos, sin


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "block_size", "dtype", "stored"),
    [
        ("default", 4, 4, 16, torch.float32, "float32"),
        ("linear", 6, 2, 32, torch.float16, "float16"),
        ("llama3", 8, 1, 64, torch.bfloat16, "bfloat16"),
        ("yarn", 4, 2, 16, torch.float16, "int8"),
        ("factors", 3, 3, 8, torch.float32, "fp8"),
        ("default", 2, 1, 32, torch.bfloat16, "fp8"),
        ("yarn", 2, 2, 64, torch.float32, "int8"),
    ],
)
def test_rope_write(
    kind: str, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype, stored: str, device: str
) -> None:
    rope = SCALINGS[kind]
    shape = PageShape(2, kv_heads, block_size, rope.dimensions, stored)  # type: ignore[arg-type]
    pages = Pages(torch.full((9, shape.block_bytes), 0x11, dtype=torch.uint8, device=device), shape)
    before = pages.raw.clone()
    rows, dim = 5, rope.dimensions
    places = [random.randrange(1_000) for _ in range(rows)]
    slots = [*random.sample(range(9), rows - 1), -1]
    qkv = (torch.randn(rows, heads + 2 * kv_heads, dim) * 2).to(dtype).to(device)
    given = qkv.clone()
    cos, sin = tables(rope, 1_000, device)
    at = torch.tensor(places, dtype=torch.int32, device=device)
    rope_write(
        qkv.view(rows, -1), cos, sin, at, torch.tensor(slots, dtype=torch.int32, device=device), pages, 1
    )
    frequencies, factor = inverse_frequencies(rope)
    turned = operations.rope(
        given[:, : heads + kv_heads].cpu(), at.cpu(), torch.from_numpy(frequencies), factor
    )
    near(qkv[:, :heads], turned[:, :heads], dtype)
    for row, (place, slot) in enumerate(zip(places, slots, strict=True)):
        if slot < 0:
            continue
        keys, values = stored_vectors(pages, 1, slot, place % block_size)
        tolerance = {"int8": 1 / 250, "fp8": 1 / 15}.get(stored)
        for got, expected in (
            (keys, turned[row, heads:]),
            (values, given[row, heads + kv_heads :].cpu().double()),
        ):
            if tolerance is None:
                near(got, expected, dtype)
            else:
                assert ((got - expected).abs().amax(-1) <= tolerance * expected.abs().amax(-1)).all()
    assert torch.equal(pages.raw[untouched(slots)], before[untouched(slots)])
    vector = dim * (4 if stored == "float32" else 1 if shape.scaled else 2) + (4 if shape.scaled else 0)
    changed = (pages.raw != before).sum(dim=1)
    assert (changed <= 2 * kv_heads * vector).all()


def untouched(slots: list[int]) -> list[int]:
    return [slot for slot in range(9) if slot not in slots]


def stored_vectors(pages: Pages, layer: int, slot: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, head_dim] of a token, float64, scales applied."""
    shape = pages.shape
    raw = pages.raw[slot, : shape.value_bytes]
    if shape.format == "fp8":
        typed = raw.view(torch.float8_e4m3fn).double()
    else:
        typed = raw.view(pages.values.dtype).double()
    both = typed.view(shape.layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)[layer, :, :, offset]
    if shape.scaled:
        scales = pages.raw[slot, shape.value_bytes :].view(torch.float32).double()
        both = (
            both * scales.view(shape.layers, 2, shape.kv_heads, shape.block_size)[layer, :, :, offset, None]
        )
    keys, values = both.cpu()
    return keys, values


def test_pages_hold_only_finite_numbers(device: str) -> None:
    for stored, largest in (("float16", 65_504.0), ("int8", 1e30)):
        shape = PageShape(1, 1, 8, 16, stored)  # type: ignore[arg-type]
        pages = Pages(torch.zeros(2, shape.block_bytes, dtype=torch.uint8, device=device), shape)
        qkv = torch.zeros(1, 3, 16, device=device)
        qkv[0, :, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 70_000.0])
        cos, sin = tables(Rope(dimensions=16, theta=10_000.0), 4, device)
        zero, one = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 1))
        rope_write(qkv.view(1, -1), cos, sin, zero, one, pages, 0)
        _, values = stored_vectors(pages, 0, 1, 0)
        assert values[0, 0] == 0
        assert torch.isfinite(values).all()
        assert abs(float(values[0, 1]) - largest) <= 0.01 * largest
