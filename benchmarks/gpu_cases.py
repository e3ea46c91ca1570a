"""What `benchmarks/gpu.py` times: kernels at the sizes of Llama 3 8B, each checked before it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention

from baton.runner.triton_tuning import Tuning
from baton_kernels.gpu.attention import paged_attention
from baton_kernels.gpu.attention_plan import AttentionPlan, Run, plan_attention, plan_decodes
from baton_kernels.gpu.kv_move import gather_blocks
from baton_kernels.gpu.linear import linear
from baton_kernels.gpu.pages import STORED, KvFormat, Pages, PageShape
from baton_kernels.gpu.quantise import WeightFormat, quantise


@dataclass(slots=True, frozen=True)
class Sizes:
    """Of what is run; `small` ones only show that the script works."""

    hidden: int = 4_096
    ffn: int = 14_336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    context: int = 8_192
    batch: int = 32
    chunk: int = 2_048
    split: int = 512
    copy_mb: int = 1_024
    matrix: int = 8_192
    rows: tuple[int, ...] = (1, 16, 512, 2_048)
    format: KvFormat = "bfloat16"  # of everything but few-bit weights

    @property
    def dtype(self) -> torch.dtype:
        return STORED[self.format]


# float32: Triton's interpreter multiplies no bfloat16.
SMALL = Sizes(64, 96, 1, 4, 2, 32, 259, 100, 2, 20, 64, 1, 64, (1, 9), "float32")


@dataclass(slots=True, frozen=True)
class Machine:
    """What the hardware was measured to do."""

    device: torch.device
    bytes_per_s: float  # read and written by a copy
    flops: float  # bfloat16 products by cuBLAS


@dataclass(slots=True, frozen=True)
class Row:
    """A line of the table."""

    name: str
    microseconds: float
    share: float  # of `against`
    against: str
    wanted: float = 0.0  # share asked for; 0: none


def microseconds(device: torch.device, call: Callable[[], object], rounds: int = 10) -> float:
    """The median time of a call on the device, after one that compiles."""
    call()
    times = []
    for _ in range(rounds if device.type == "cuda" else 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
    return float(np.median(times))


def measure(device: torch.device, sizes: Sizes) -> Machine:
    """Copy bandwidth and matrix rate of this machine."""
    source = torch.empty(sizes.copy_mb << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = microseconds(device, lambda: target.copy_(source))
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(sizes.dtype) for _ in range(2))
    product = microseconds(device, lambda: a @ b)
    return Machine(device, 2 * source.nbytes / copied * 1e6, 2 * sizes.matrix**3 / product * 1e6)


def decode_attention(machine: Machine, sizes: Sizes) -> Iterator[Row]:
    """`batch` sequences of `context` tokens, a query each: bound by reading K and V."""
    pages, tables = _pool(machine.device, sizes, sizes.batch)
    queries = torch.randn(sizes.batch, sizes.heads * sizes.head_dim, device=machine.device).to(sizes.dtype)
    plan = plan_decodes(sizes.batch, -(-sizes.context // sizes.split))
    plan.tiles[:, 2] = sizes.context - 1
    out = torch.zeros_like(queries)
    call = _attention_call(pages, queries, tables, plan, sizes, out)
    call()
    _check("decode attention", out, _dense(pages, queries, tables, sizes, sizes.context - 1))
    took = microseconds(machine.device, call)
    read = sizes.batch * sizes.context * 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    yield Row(
        f"attention, {sizes.batch} decodes at {sizes.context}", took,
        read / took * 1e6 / machine.bytes_per_s, "copy bandwidth", 0.80,
    )  # fmt: skip


def chunk_attention(machine: Machine, sizes: Sizes) -> Iterator[Row]:
    """A chunk of a long prompt, and torch's own attention over the same keys, laid side by side."""
    pages, tables = _pool(machine.device, sizes, 1)
    queries = torch.randn(sizes.chunk, sizes.heads * sizes.head_dim, device=machine.device).to(sizes.dtype)
    start = sizes.context - sizes.chunk
    plan = plan_attention([Run(0, sizes.chunk, start, 0)], sizes.heads // sizes.kv_heads, sizes.split)
    out = torch.zeros_like(queries)
    call = _attention_call(pages, queries, tables, plan, sizes, out)
    took = microseconds(machine.device, call)
    flops = 4 * sizes.heads * sizes.head_dim * sizes.chunk * (start + sizes.chunk / 2)
    name = f"attention, a chunk of {sizes.chunk} up to {sizes.context}"
    yield Row(name, took, flops / took * 1e6 / machine.flops, "matrix rate", 0.60)
    both = _keys(pages, tables[0], sizes)
    keys, values = (part.repeat_interleave(sizes.heads // sizes.kv_heads, 0) for part in both)
    mine = queries.view(sizes.chunk, sizes.heads, sizes.head_dim).transpose(0, 1)
    seen = torch.ones(sizes.chunk, sizes.context, dtype=torch.bool, device=machine.device).tril(start)
    theirs = partial(scaled_dot_product_attention, mine, keys, values, attn_mask=seen)
    _check("chunk attention", out, theirs().transpose(0, 1).reshape(sizes.chunk, -1))
    yield Row("  torch's SDPA with a mask", microseconds(machine.device, theirs), 1.0, "itself")


def products(machine: Machine, sizes: Sizes, tuning: Tuning) -> Iterator[Row]:
    """The four matrices of a layer; ours against cuBLAS, and few bits at one row against the bandwidth."""
    shapes = {
        "qkv": ((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden),
        "gate and up": (2 * sizes.ffn, sizes.hidden),
        "down": (sizes.hidden, sizes.ffn),
    }
    formats: tuple[WeightFormat, ...] = ("plain", "int8", "fp8", "int4")
    for name, (columns, inner) in shapes.items():
        matrix = (torch.randn(columns, inner, device=machine.device) * inner**-0.5).to(sizes.dtype)
        for format in formats:
            weight = quantise(matrix, format)
            for rows in sizes.rows if format == "plain" else sizes.rows[:1]:
                x = torch.randn(rows, inner, device=machine.device).to(sizes.dtype)
                out = torch.empty(rows, columns, dtype=sizes.dtype, device=machine.device)
                tiles = tuning.choose(weight, sizes.dtype)  # one for all row counts, as in service
                call = partial(linear, x, weight, out, tiles)
                took = microseconds(machine.device, call)
                _check(f"{name} {format}", out, torch_linear(x.float(), weight.dequantised()))
                title = f"{name} {format}, {rows} rows"
                if format == "plain":
                    theirs = microseconds(machine.device, partial(torch_linear, x, matrix))
                    yield Row(title, took, theirs / took, "cuBLAS", 0.75 if rows >= 512 else 0.0)
                else:
                    rate = weight.nbytes / took * 1e6
                    wanted = 0.0 if format == "fp8" else 0.75
                    yield Row(title, took, rate / machine.bytes_per_s, "copy bandwidth", wanted)


def moves(machine: Machine, sizes: Sizes) -> Iterator[Row]:
    """Scattered blocks into one buffer, with their checksums."""
    pages, tables = _pool(machine.device, sizes, 1)
    slots = tables[0]
    staging = torch.empty(len(slots), pages.shape.block_bytes, dtype=torch.uint8, device=machine.device)
    sums = torch.zeros(len(slots), dtype=torch.int64, device=machine.device)
    took = microseconds(machine.device, lambda: gather_blocks(pages, slots, staging, sums))
    _check("gather", staging, pages.raw[slots.long()])
    yield Row(
        f"gather of {len(slots)} blocks with checksums", took,
        2 * staging.nbytes / took * 1e6 / machine.bytes_per_s, "copy bandwidth", 0.70,
    )  # fmt: skip


def _pool(device: torch.device, sizes: Sizes, sequences: int) -> tuple[Pages, Tensor]:
    """A layer's pages with random K and V, and block tables that are shuffled."""
    each = -(-sizes.context // 16)
    shape = PageShape(1, sizes.kv_heads, 16, sizes.head_dim, sizes.format)
    values = torch.randn(sequences * each, shape.block_bytes // sizes.dtype.itemsize, device=device).to(
        sizes.dtype
    )
    order = torch.randperm(sequences * each, device=device).to(torch.int32)
    return Pages(values.view(torch.uint8), shape), order.view(sequences, each)


def _attention_call(
    pages: Pages, queries: Tensor, tables: Tensor, plan: AttentionPlan, sizes: Sizes, out: Tensor
) -> Callable[[], None]:
    device = queries.device
    tiles, items, merges = (
        torch.from_numpy(part).to(device) for part in (plan.tiles, plan.items, plan.merges)
    )
    parts = torch.empty(len(items), sizes.heads, sizes.head_dim, device=device)
    stats = torch.empty(len(items), sizes.heads, 2, device=device)
    return lambda: paged_attention(
        queries, pages, 0, tables, tiles, items, merges, parts, stats, out, split=sizes.split
    )


def _keys(pages: Pages, table: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values side by side, [kv_heads, context, head_dim] each."""
    both = pages.values.view(-1, 2, sizes.kv_heads, 16, sizes.head_dim)[table.long()]
    flat = both.permute(1, 2, 0, 3, 4).reshape(2, sizes.kv_heads, -1, sizes.head_dim)[:, :, : sizes.context]
    return flat[0], flat[1]


def _dense(pages: Pages, queries: Tensor, tables: Tensor, sizes: Sizes, position: int) -> Tensor:
    found = []
    for row, table in zip(queries, tables, strict=True):
        keys, values = (part.float() for part in _keys(pages, table, sizes))
        q = row.view(sizes.kv_heads, -1, sizes.head_dim).float()
        weights = (q @ keys[:, : position + 1].transpose(1, 2) * sizes.head_dim**-0.5).softmax(-1)
        found.append((weights @ values[:, : position + 1]).reshape(-1))
    return torch.stack(found)


def _check(name: str, got: Tensor, expected: Tensor) -> None:
    """
    Raises:
        AssertionError: they differ by more than bfloat16's rounding.
    """
    torch.testing.assert_close(
        got.float(), expected.float(), atol=3e-2, rtol=3e-2, msg=lambda told: f"{name} is wrong: {told}"
    )
