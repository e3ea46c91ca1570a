"""Running steps on the device: any step by launches, decode batches by CUDA graphs of a few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.plan import Slice
from baton.runner.triton_decoder import Buffers, TritonDecoder
from baton.runner.triton_step import (
    SPLIT,
    StepLayout,
    StepTensors,
    fill,
    lay_out,
    lay_out_decodes,
    pinned,
    size_of,
    views,
)
from baton_kernels.gpu.launch import power_of_two
from baton_kernels.gpu.pages import Pages


@dataclass(slots=True)
class DecodeShape:
    """What is kept for decode batches of one padded size."""

    host: Tensor
    device: Tensor
    step: StepTensors
    logits: Tensor
    graph: Any  # torch.cuda.CUDAGraph, or None where there is no CUDA
    copied: Any  # torch.cuda.Event: `host` may be written again


class Steps:
    """A decoder over a pool. One call at a time."""

    def __init__(
        self, decoder: TritonDecoder, pages: Pages, device: torch.device, compute: torch.dtype, *, rows: int
    ) -> None:
        """
        Args:
            rows: tokens of the largest step expected; a larger one makes the buffers anew.
        """
        self._decoder = decoder
        self._pages = pages
        self._device = device
        self._compute = compute
        self._shapes: dict[tuple[int, int], DecodeShape] = {}
        self._queries_per_kv = decoder.config.heads // decoder.config.kv_heads
        self._buffers = self._made(rows, rows)

    def run(self, slices: Sequence[Slice], wanted: Sequence[int]) -> Tensor:
        """Logits float32 [wanted, vocab_size] of the named slices' last tokens; good until the next call."""
        if all(len(part.tokens) == 1 for part in slices):
            logits = self._decode(slices)
            return logits if len(wanted) == len(slices) else logits[list(wanted)]
        layout = lay_out(slices, wanted, self._pages.shape, self._queries_per_kv)
        self._make_room(len(layout.ids), len(layout.plan.items))
        return self._launch(layout)

    def all_rows(self, part: Slice) -> Tensor:
        """Logits float32 [tokens, vocab_size] of all of a slice's tokens; good until the next call."""
        every = np.arange(len(part.tokens), dtype=np.int32)
        layout = replace(lay_out([part], [], self._pages.shape, self._queries_per_kv), sampled=every)
        self._make_room(len(layout.ids), len(layout.plan.items))
        return self._launch(layout)

    def prepare(self, sequences: int) -> None:
        """Compiles, and captures graphs for short decode batches of up to `sequences`."""
        rows = 1
        while rows <= power_of_two(sequences):
            self._shape(rows, 1)
            rows *= 2

    def _launch(self, layout: StepLayout) -> Tensor:
        host = pinned(size_of(layout), self._device)
        fill(layout, host)
        step = views(layout, host.to(self._device, non_blocking=True))
        return self._decoder.forward(step, self._pages, self._buffers)

    def _decode(self, slices: Sequence[Slice]) -> Tensor:
        rows = power_of_two(len(slices))
        splits = power_of_two(max(part.start for part in slices) // SPLIT + 1)
        shape = self._shape(rows, splits)
        layout = lay_out_decodes(slices, rows, splits, self._pages.shape)
        if shape.copied is not None:
            shape.copied.synchronize()
        fill(layout, shape.host)
        shape.device.copy_(shape.host, non_blocking=True)
        if shape.graph is None:
            self._decoder.forward(shape.step, self._pages, self._buffers)
        else:
            shape.copied.record()
            shape.graph.replay()
        return shape.logits[: len(slices)]

    def _shape(self, rows: int, splits: int) -> DecodeShape:
        """The kept tensors, and the graph, for a padded size."""
        self._make_room(rows, rows * splits)
        known = self._shapes.get((rows, splits))
        if known is not None:
            return known
        idle = lay_out_decodes([], rows, splits, self._pages.shape)
        host = pinned(size_of(idle), self._device)
        fill(idle, host)
        device = host.to(self._device)
        step = views(idle, device)
        logits = self._decoder.forward(step, self._pages, self._buffers)  # compiles what is new
        on_gpu = self._device.type == "cuda"
        graph, copied = (self._captured(step), torch.cuda.Event()) if on_gpu else (None, None)
        made = self._shapes[rows, splits] = DecodeShape(host, device, step, logits, graph, copied)
        return made

    def _captured(self, step: StepTensors) -> Any:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Meanwhile the worker's other thread may copy blocks: that must not end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._decoder.forward(step, self._pages, self._buffers)
        return graph

    def _make_room(self, rows: int, items: int) -> None:
        """Graphs hold the buffers' addresses: they go when the buffers do."""
        if rows > self._buffers.rows or items > self._buffers.items:
            self._shapes.clear()
            self._buffers = self._made(max(rows, self._buffers.rows), max(items, self._buffers.items))

    def _made(self, rows: int, items: int) -> Buffers:
        return Buffers(self._decoder.config, self._device, self._compute, rows=rows, logits=rows, items=items)
