"""A step of paged attention, laid out for the GPU kernels over scattered blocks, and its reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from baton_kernels.gpu.attention import paged_attention
from baton_kernels.gpu.attention_plan import AttentionPlan, Run, plan_attention
from baton_kernels.gpu.pages import STORED, Pages, PageShape

BLOCKS = 120


@dataclass
class Sequences:
    """Keys and values of sequences, in one layer of a pool; other memory holds large numbers."""

    shape: PageShape
    device: str
    layer: int = 0
    tables: list[list[int]] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)  # as read: float64 [known, kv_heads, head_dim]
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        raw = torch.full((BLOCKS, self.shape.block_bytes), 0x5B, dtype=torch.uint8, device=self.device)
        self.pages = Pages(raw, self.shape)
        self.free = random.sample(range(BLOCKS), BLOCKS)

    def add(self, known: int) -> int:
        """A sequence of `known` random tokens; its number."""
        shape = self.shape
        table = [self.free.pop() for _ in range(-(-known // shape.block_size))]
        both = torch.randn(2, shape.kv_heads, len(table) * shape.block_size, shape.head_dim)
        stored, scales = _stored(both, shape)
        size = shape.block_size
        for number, slot in enumerate(table):
            part = slice(number * size, (number + 1) * size)
            block = self.pages.raw[slot]
            typed = block[: shape.value_bytes].view(STORED[shape.format])
            view = typed.view(shape.layers, 2, shape.kv_heads, size, shape.head_dim)
            view[self.layer] = stored[:, :, part].to(self.device)
            if shape.scaled:
                floats = block[shape.value_bytes :].view(torch.float32)
                view = floats.view(shape.layers, 2, shape.kv_heads, size)
                view[self.layer] = scales[:, :, part].to(self.device)
        read = _read(stored, shape) * scales[..., None].double() if shape.scaled else _read(stored, shape)
        self.tables.append(table)
        self.keys.append(read[0, :, :known].transpose(0, 1))
        self.values.append(read[1, :, :known].transpose(0, 1))
        return len(self.tables) - 1

    def attend(
        self, queries: torch.Tensor, runs: list[Run], split: int, *, plan: AttentionPlan | None = None,
        cap: float = 0.0, window: int = 0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The kernel's answer for queries [rows, heads, head_dim]: [rows, heads * head_dim]."""
        rows, heads, head_dim = queries.shape
        plan = plan or plan_attention(runs, heads // self.shape.kv_heads, split)
        width = max(len(table) for table in self.tables)
        tables = np.zeros((len(self.tables), width), dtype=np.int32)
        for number, table in enumerate(self.tables):
            tables[number, : len(table)] = table
        parts = torch.full((len(plan.items), heads, head_dim), 9e9, device=self.device)
        stats = torch.full((len(plan.items), heads, 2), 9e9, device=self.device)
        out = torch.full((rows, heads * head_dim), -7.0, dtype=queries.dtype, device=self.device)
        paged_attention(
            queries.reshape(rows, -1), self.pages, self.layer,
            *(self._there(part) for part in (tables, plan.tiles, plan.items, plan.merges)),
            parts, stats, out, split=split, cap=cap, window=window, sinks=sinks,
        )  # fmt: skip
        return out

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def expected(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, *,
    cap: float = 0.0, window: int = 0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The whole softmax in float64: queries [rows, heads, head_dim] of positions from `start` on."""
    rows, heads, head_dim = queries.shape
    shared = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", queries.double().cpu(), keys) * head_dim**-0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    position, key = start + torch.arange(rows)[:, None], torch.arange(len(keys))
    seen = key <= position
    if window:
        seen &= key > position - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().cpu()[:, None, None].expand(heads, rows, 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).reshape(rows, -1)


def _stored(both: torch.Tensor, shape: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
    scales = both.abs().amax(-1)
    if shape.format == "int8":
        scales = scales / 127
        return (both / scales[..., None]).round().to(torch.int8), scales
    if shape.format == "fp8":
        scales = scales / 448
        return (both / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scales
    return both.to(STORED[shape.format]), scales


def _read(stored: torch.Tensor, shape: PageShape) -> torch.Tensor:
    return (stored.view(torch.float8_e4m3fn) if shape.format == "fp8" else stored).double()
