"""The decoder as a list of kernel launches over buffers that are made once."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.description import DecoderConfig
from baton.runner.triton_step import SPLIT, StepTensors
from baton.runner.triton_weights import DeviceLayer, DeviceWeights
from baton_kernels.gpu.attention import paged_attention
from baton_kernels.gpu.gated import silu_mul
from baton_kernels.gpu.gather import gather_rows
from baton_kernels.gpu.pages import Pages
from baton_kernels.gpu.rms_norm import rms_norm
from baton_kernels.gpu.rope_write import rope_write


class Buffers:
    """Activations of up to `rows` rows, logits of up to `logits`, partial sums of up to `items` programs."""

    def __init__(
        self, config: DecoderConfig, device: torch.device, compute: torch.dtype,
        *, rows: int, logits: int, items: int,
    ) -> None:  # fmt: skip
        def new(*shape: int, dtype: torch.dtype = compute) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        queries = config.heads * config.head_dim
        self.rows, self.items = rows, items
        self.hidden = new(rows, config.hidden, dtype=torch.float32)  # the residual
        self.normed = new(rows, config.hidden)
        self.qkv = new(rows, queries + 2 * config.kv_heads * config.head_dim)
        # What padding rows have here is read by the next product, whose rows do not mix.
        self.attended = torch.zeros(rows, queries, dtype=compute, device=device)
        self.update = new(rows, config.hidden, dtype=torch.float32)
        self.gate_up = new(rows, 2 * config.ffn)
        self.gated = new(rows, config.ffn)
        self.picked = new(logits, config.hidden)
        self.logits = new(logits, config.vocab_size, dtype=torch.float32)
        self.parts = new(items, config.heads, config.head_dim, dtype=torch.float32)
        self.part_stats = new(items, config.heads, 2, dtype=torch.float32)


class TritonDecoder:
    """A decoder ready to run. Launches only: nothing here waits for the device."""

    def __init__(self, config: DecoderConfig, weights: DeviceWeights) -> None:
        self.config = config
        self._weights = weights

    def forward(self, step: StepTensors, pages: Pages, buffers: Buffers) -> Tensor:
        """A step: writes K and V of all its tokens, gives logits float32 [sampled, vocab_size]."""
        config, weights = self.config, self._weights
        rows = len(step.ids)
        hidden, normed = buffers.hidden[:rows], buffers.normed[:rows]
        update = buffers.update[:rows]
        gather_rows(weights.table, step.ids, hidden)
        before: Tensor | None = None
        for number, layer in enumerate(weights.layers):
            rms_norm(hidden, layer.attention_norm, config.rms_eps, normed, update=before)
            self._attention(number, layer, step, pages, buffers, rows)
            rms_norm(hidden, layer.ffn_norm, config.rms_eps, normed, update=update)
            layer.gate_up(normed, buffers.gate_up[:rows])
            silu_mul(buffers.gate_up[:rows], buffers.gated[:rows])
            layer.down(buffers.gated[:rows], update)
            before = update
        wanted = len(step.sampled)
        if not wanted:
            return buffers.logits[:0]
        rms_norm(hidden, weights.final_norm, config.rms_eps, normed, update=before)
        picked, logits = buffers.picked[:wanted], buffers.logits[:wanted]
        gather_rows(normed, step.sampled, picked)
        weights.head(picked, logits)
        return logits

    def _attention(
        self, number: int, layer: DeviceLayer, step: StepTensors, pages: Pages, buffers: Buffers, rows: int
    ) -> None:
        """A layer's attention with its output projection, into `buffers.update`."""
        qkv, attended = buffers.qkv[:rows], buffers.attended[:rows]
        layer.qkv(buffers.normed[:rows], qkv)
        rope_write(qkv, self._weights.cos, self._weights.sin, step.positions, step.slots, pages, number)
        paged_attention(
            qkv, pages, number, step.tables, step.tiles, step.items, step.merges,
            buffers.parts, buffers.part_stats, attended, split=SPLIT,
        )  # fmt: skip
        layer.o(attended, buffers.update[:rows])
