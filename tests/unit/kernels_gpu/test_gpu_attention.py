"""Paged attention against the whole softmax in float64, and the same bits for the same row."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from gpu_attention import Sequences, expected

from baton_kernels.gpu.attention_plan import Run, plan_attention, plan_decodes
from baton_kernels.gpu.pages import KvFormat, PageShape

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CLOSE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


@dataclass
class Case:
    dtype: str
    stored: KvFormat
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    split: int = 128
    cap: float = 0.0
    window: int = 0
    sinks: bool = False


# Each value of a dimension with each of its neighbours' once, not the whole product.
CASES = [
    Case("float32", "float32", 4, 4, 64, 16),
    Case("float16", "float16", 16, 1, 128, 32, window=70),
    Case("bfloat16", "bfloat16", 6, 2, 96, 64, cap=3.0),
    Case("float16", "int8", 8, 2, 80, 16, sinks=True),
    Case("bfloat16", "fp8", 4, 1, 256, 32, window=130, sinks=True),
    Case("float32", "fp8", 2, 2, 64, 64, cap=2.0, window=1),
    Case("float32", "int8", 5, 1, 112, 64, split=64, sinks=True),
    Case("float16", "fp8", 3, 3, 128, 8, cap=5.0, sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixed_step(case: Case, device: str) -> None:
    """Single tokens and chunks in one launch, of ragged lengths, over two layers' pages."""
    shape = PageShape(2, case.kv_heads, case.block_size, case.head_dim, case.stored)
    sequences = Sequences(shape, device, layer=1)
    pieces = [(0, 1), (random.randrange(1, 127), 1), (random.randrange(128, 200), 1), (0, 5), (126, 40)]
    runs, row = [], 0
    for start, length in pieces:
        runs.append(Run(row, length, start, sequences.add(start + length)))
        row += length
    queries = torch.randn(row + 1, case.heads, case.head_dim, device=device).to(FLOATS[case.dtype])
    sinks = torch.randn(case.heads, device=device) * 3 if case.sinks else None
    rules = {"cap": case.cap, "window": case.window, "sinks": sinks}
    out = sequences.attend(queries, runs, case.split, **rules)  # type: ignore[arg-type]
    for run in runs:
        mine = slice(run.row, run.row + run.length)
        wanted = expected(
            queries[mine], sequences.keys[run.table], sequences.values[run.table], run.start, **rules
        )  # type: ignore[arg-type]
        close = CLOSE[case.dtype]
        torch.testing.assert_close(out[mine].double().cpu(), wanted, atol=2 * close, rtol=close)
    assert (out[row:] == -7).all()


@pytest.mark.parametrize(("dtype", "stored", "group"), [("float32", "float32", 2), ("float16", "int8", 3)])
def test_the_same_row_has_the_same_bits(dtype: str, stored: KvFormat, group: int, device: str) -> None:
    """A prompt's last rows: in one chunk, in small ones, alone, among neighbours, and in a graph's plan."""
    shape = PageShape(1, 1, 16, 64, stored)
    sequences = Sequences(shape, device)
    other, mine = sequences.add(90), sequences.add(150)
    queries = torch.randn(150, group, 64, device=device).to(FLOATS[dtype])
    noise = torch.randn(20, group, 64, device=device).to(FLOATS[dtype])
    whole = sequences.attend(queries, [Run(0, 150, 0, mine)], 64)
    tail = sequences.attend(queries[100:], [Run(0, 50, 100, mine)], 64)
    assert torch.equal(tail, whole[100:])
    mixed = torch.cat([noise[:1], queries[131:], noise[1:9]])
    runs = [Run(0, 1, 70, other), Run(1, 19, 131, mine), Run(20, 8, 5, other)]
    assert torch.equal(sequences.attend(mixed, runs, 64)[1:20], whole[131:])
    for position in (149, 128, 127, 63):
        row = queries[position : position + 1]
        alone = sequences.attend(row, [Run(0, 1, position, mine)], 64)
        assert torch.equal(alone[0], whole[position])
        plan = plan_decodes(2, 3)
        plan.tiles[:, 2], plan.tiles[:, 3] = (position, 0), (mine, other)
        pair = sequences.attend(torch.cat([row, noise[:1]]), [], 64, plan=plan)
        assert torch.equal(pair[0], whole[position])


def test_idle_rows_of_a_graph_are_left_alone(device: str) -> None:
    sequences = Sequences(PageShape(1, 1, 16, 64, "float32"), device)
    sequences.add(100)
    plan = plan_decodes(2, 2)
    plan.tiles[:] = [(0, 1, 99, 0), (1, 0, 0, 0)]
    out = sequences.attend(torch.randn(2, 2, 64, device=device), [], 64, plan=plan)
    assert (out[0] != -7).all()
    assert (out[1] == -7).all()


def test_plan_covers_each_query_once() -> None:
    runs = [Run(0, 1, 500, 0), Run(1, 70, 30, 1), Run(71, 1, 3, 2)]
    plan = plan_attention(runs, 3, 128)
    rows = [row + at for row, length, _, _ in plan.tiles.tolist() for at in range(length)]
    assert rows == list(range(72))
    assert all(length * 3 <= 64 for _, length, _, _ in plan.tiles.tolist())
    assert plan.items.tolist() == [
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        *([n, -1] for n in range(1, len(plan.tiles))),
    ]
    assert plan.merges.tolist() == [[0, 0]]
