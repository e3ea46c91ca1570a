"""Every kernel in every configuration that this software launches, as launches of tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton_kernels.gpu import kv_move, sampling
from baton_kernels.gpu.attention import paged_attention
from baton_kernels.gpu.gated import silu_mul
from baton_kernels.gpu.gather import gather_rows
from baton_kernels.gpu.launch import Variant, noting
from baton_kernels.gpu.linear import linear
from baton_kernels.gpu.pages import KvFormat, Pages, PageShape
from baton_kernels.gpu.quantise import RUN, Weight, WeightFormat
from baton_kernels.gpu.rms_norm import rms_norm
from baton_kernels.gpu.rope_write import rope_write
from baton_kernels.gpu.tiles import candidates

COMPUTE = (torch.float16, torch.bfloat16, torch.float32)
# What activations may be of beside pages of a format.
PAIRS: list[tuple[torch.dtype, KvFormat]] = [
    (torch.float16, "float16"),
    (torch.bfloat16, "bfloat16"),
    (torch.float32, "float32"),
    (torch.bfloat16, "int8"),
    (torch.float16, "fp8"),
]
HEADS, KV_HEADS, ROWS, HIDDEN = 32, 8, 64, 4_096


def variants() -> list[Variant]:
    """Each compiled kernel once."""
    with noting() as found:
        for dtype in COMPUTE:
            _rows(dtype)
        for dtype, stored in PAIRS:
            for head_dim in (64, 128, 256):
                _pages(dtype, stored, head_dim)
        _rules()
        _moves()
        _choices()
        for dtype, weight in _weights():
            for tiles in candidates(dtype, weight.format):
                linear(_new(ROWS, HIDDEN, dtype=dtype), weight, _new(ROWS, HIDDEN, dtype=dtype), tiles)
    return list({variant.key: variant for variant in found}.values())


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> torch.Tensor:
    return _new(*shape, dtype=torch.int32)


def _rows(dtype: torch.dtype) -> None:
    x, weight, out = _new(ROWS, HIDDEN), _new(HIDDEN), _new(ROWS, HIDDEN, dtype=dtype)
    rms_norm(x, weight, 1e-5, out)
    rms_norm(x, weight, 1e-5, out, update=out)
    rms_norm(x, weight, 1e-5, out, picked=_ints(ROWS))
    silu_mul(_new(ROWS, 2 * HIDDEN, dtype=dtype), out)
    gather_rows(_new(1_000, HIDDEN, dtype=dtype), _ints(ROWS), x)


def _pool(stored: KvFormat, head_dim: int, block_size: int = 16) -> Pages:
    shape = PageShape(4, KV_HEADS, block_size, head_dim, stored)
    return Pages(_new(10, shape.block_bytes, dtype=torch.uint8), shape)


def _pages(dtype: torch.dtype, stored: KvFormat, head_dim: int) -> None:
    pages = _pool(stored, head_dim)
    qkv = _new(ROWS, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype)
    table = _new(1_000, head_dim // 2)
    rope_write(qkv, table, table, _ints(ROWS), _ints(ROWS), pages, 0)
    _attend(pages, qkv)


def _attend(
    pages: Pages, qkv: torch.Tensor, *, cap: float = 0.0, window: int = 0, sinks: torch.Tensor | None = None
) -> None:
    head_dim = pages.shape.head_dim
    paged_attention(
        qkv, pages, 0, _ints(ROWS, 99), _ints(ROWS, 4), _ints(ROWS, 2), _ints(ROWS, 2),
        _new(ROWS, HEADS, head_dim), _new(ROWS, HEADS, 2), _new(ROWS, HEADS * head_dim, dtype=qkv.dtype),
        split=512, cap=cap, window=window, sinks=sinks,
    )  # fmt: skip


def _rules() -> None:
    pages = _pool("bfloat16", 128)
    qkv = _new(ROWS, (HEADS + 2 * KV_HEADS) * 128, dtype=torch.bfloat16)
    _attend(pages, qkv, cap=30.0)
    _attend(pages, qkv, window=4_096)
    _attend(pages, qkv, sinks=_new(HEADS))


def _moves() -> None:
    pages = _pool("bfloat16", 128)
    staging = _new(10, pages.shape.block_bytes, dtype=torch.uint8)
    for sums in (None, _new(10, dtype=torch.int64)):
        kv_move.gather_blocks(pages, _ints(10), staging, sums)
        kv_move.scatter_blocks(pages, _ints(10), staging, sums)
    formats: tuple[KvFormat, ...] = ("float32", "bfloat16", "int8", "fp8")
    for stored in formats:
        source, target = _pool(stored, 128), _pool(stored, 128, 64)
        kv_move.reshape_pages(source, _ints(9), target, _ints(9), 99, heads=4)


def _choices() -> None:
    scores, tokens = _new(ROWS, 128_256), _ints(ROWS)
    lists = (_ints(ROWS), _ints(ROWS + 1), _ints(99), _new(99), _new(ROWS, 3))
    for kind in (sampling.BIAS, sampling.BAN, sampling.PENALTY):
        sampling.edit_scores(scores, kind, *lists)
    for words in (None, _ints(ROWS, 4_008)):
        sampling.sample(scores, 128_000, _ints(ROWS, 2), _new(ROWS, 4, dtype=torch.float64), tokens, words)


def _weights() -> Iterator[tuple[torch.dtype, Weight]]:
    formats: tuple[WeightFormat, ...] = ("int8", "fp8", "int4")
    for dtype in COMPUTE:
        yield dtype, Weight("plain", _new(HIDDEN, HIDDEN, dtype=dtype))
    for format in formats:
        narrow = (HIDDEN, HIDDEN // 2) if format == "int4" else (HIDDEN, HIDDEN)
        values = _new(*narrow, dtype=torch.int8 if format == "int8" else torch.uint8)
        if format == "int4":
            groups = _new(HIDDEN, HIDDEN // RUN, dtype=torch.float16)
            yield torch.bfloat16, Weight(format, values, groups, groups)
        else:
            yield torch.bfloat16, Weight(format, values, _new(HIDDEN))
