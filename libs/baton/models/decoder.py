"""The decoder: Llama's family, described by a `DecoderConfig`, with its keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.description import DecoderConfig
from baton.models.errors import UnsupportedModel
from baton.models.rope import inverse_frequencies
from baton.models.weights import LARGEST_HALF, Weights
from baton_kernels.attention_plan import Group, Span, plan_attention
from baton_kernels.embedding import embedding
from baton_kernels.gated import silu_mul
from baton_kernels.head import logits
from baton_kernels.kv_write import Page, kv_write, layer_rows, write_rows
from baton_kernels.linear import Linear
from baton_kernels.paged_attention import paged_attention
from baton_kernels.rms_norm import add_rms_norm, rms_norm
from baton_kernels.rope import RopeTable, rope_
from baton_kernels.rows import padded


@dataclass(slots=True, frozen=True)
class Layer:
    """One layer's weights, packed."""

    attention_norm: Tensor  # float32 [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim: queries, keys, values
    o: Linear
    ffn_norm: Tensor
    gate_up: Linear  # hidden -> 2 * ffn
    down: Linear


class PagedKv:
    """A KV pool as the kernels see it: two views of the same memory, no copy."""

    def __init__(self, storage: Tensor, page: Page) -> None:
        """
        Args:
            storage: the whole pool, one dimension, of the KV dtype.
            page: a block's shape: layers, 2, kv_heads, block_size, head_dim.
        """
        layers, pair, kv_heads, block_size, head_dim = page
        self.page = page
        self.vectors = storage.view(-1, head_dim)
        self.layers = storage.view(-1, pair * kv_heads * block_size * head_dim)
        self.num_blocks = len(self.layers) // layers


@dataclass(slots=True, frozen=True)
class Batch:
    """The tokens of one step, laid out for the kernels. Rows beyond `count` are padding."""

    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    count: int
    writes: Tensor  # int64 [count * 2 * kv_heads], where K and V go in layer 0
    groups: list[Group]
    sampled: Tensor  # int64 [n]: the rows whose logits are wanted


class Decoder:
    """A decoder ready to run. One call at a time."""

    def __init__(self, config: DecoderConfig, weights: Weights, *, half: bool, threads: int = 1) -> None:
        """Reads and packs all weights.

        Args:
            half: float16 weights (FBGEMM); else float32.
            threads: layers packed at once.

        Raises:
            ModelFileError: a weight is missing or damaged.
            UnsupportedModel: a weight does not fit float16.
        """
        self.config = config
        self._half = half
        self._weights: Weights = weights
        with ThreadPoolExecutor(max(threads, 1), "baton-load") as pool:
            outside = pool.submit(self._load_outside)
            self._layers = list(pool.map(self._load_layer, range(config.layers)))
            self._table, self._head, self._final_norm = outside.result()
        del self._weights
        self._rope = RopeTable(*inverse_frequencies(config.rope))

    def page(self, block_size: int) -> Page:
        """The shape of a KV block."""
        return (self.config.layers, 2, self.config.kv_heads, block_size, self.config.head_dim)

    def batch(
        self,
        ids: Sequence[int],
        spans: Sequence[Span],
        sampled: Sequence[int],
        page: Page,
    ) -> Batch:
        """Lays out a step.

        Args:
            ids: a token for each row.
            spans: which rows belong together; in row order, single rows first.
            sampled: the rows whose logits are wanted.
        """
        count = len(ids)
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])
        block_size = page[3]
        slots = [
            span.blocks[place // block_size]
            for span in spans
            for place in range(span.start, span.start + span.length)
        ]
        padding = padded(count, self._layers[0].qkv.gemm) - count
        return Batch(
            ids=torch.tensor([*ids, *([0] * padding)]),
            positions=torch.nn.functional.pad(positions, (0, padding)),
            count=count,
            writes=write_rows(torch.tensor(slots), positions % block_size, page),
            groups=plan_attention(spans, page, self.config.heads // self.config.kv_heads),
            sampled=torch.tensor(sampled, dtype=torch.int64),
        )

    def forward(self, batch: Batch, kv: PagedKv) -> Tensor:
        """A step: writes K and V of all its tokens, gives logits float32 [sampled, vocab_size]."""
        config = self.config
        hidden = embedding(batch.ids, self._table)
        cos, sin = self._rope.rows(batch.positions)
        attended = torch.zeros(len(hidden), config.heads * config.head_dim)
        update: Tensor | None = None
        for number, layer in enumerate(self._layers):
            if update is None:
                normed = rms_norm(hidden, layer.attention_norm, config.rms_eps)
            else:
                normed = add_rms_norm(hidden, update, layer.attention_norm, config.rms_eps)
            self._attention(number, layer, normed, cos, sin, batch, kv, attended)
            normed = add_rms_norm(hidden, layer.o(attended), layer.ffn_norm, config.rms_eps)
            update = layer.down(silu_mul(layer.gate_up(normed)))
        if not batch.sampled.numel():
            return torch.empty(0, config.vocab_size)
        assert update is not None  # there is at least one layer
        hidden.add_(update)
        return logits(hidden, batch.sampled, self._final_norm, config.rms_eps, self._head, config.real_vocab)

    def _attention(
        self,
        number: int,
        layer: Layer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        kv: PagedKv,
        out: Tensor,
    ) -> None:
        """One layer's attention before its output projection, into `out` [rows, heads * head_dim]."""
        config = self.config
        heads, keys_to = config.heads, config.heads + config.kv_heads
        qkv = layer.qkv(normed).view(len(normed), keys_to + config.kv_heads, config.head_dim)
        rope_(qkv[:, :keys_to], cos, sin)
        kv_write(kv.vectors, batch.writes + number * layer_rows(kv.page), qkv[: batch.count, heads:])
        paged_attention(qkv[:, :heads], kv.layers, number, kv.page, batch.groups, out)

    def _load_layer(self, number: int) -> Layer:
        def get(name: str) -> Tensor:
            return self._weights.tensor(f"layers.{number}.{name}")

        return Layer(
            attention_norm=get("attention_norm"),
            qkv=self._linear(torch.cat([get("q"), get("k"), get("v")]), f"q, k or v of layer {number}"),
            o=self._linear(get("o"), f"o of layer {number}"),
            ffn_norm=get("ffn_norm"),
            gate_up=self._linear(torch.cat([get("gate"), get("up")]), f"gate or up of layer {number}"),
            down=self._linear(get("down"), f"down of layer {number}"),
        )

    def _load_outside(self) -> tuple[Tensor, Linear, Tensor]:
        """Embedding table, head, final norm."""
        table = self._weights.tensor("embedding")
        head = table if self.config.tied_embeddings else self._weights.tensor("head")
        packed = self._linear(head, "the head")
        if self._half:
            self._check_half(table, "the embedding")
            table = table.half()
        return table, packed, self._weights.tensor("final_norm")

    def _linear(self, weight: Tensor, what: str) -> Linear:
        if self._half:
            self._check_half(weight, what)
        return Linear(weight, half=self._half)

    def _check_half(self, weight: Tensor, what: str) -> None:
        low, high = (float(x) for x in torch.aminmax(weight))
        if max(-low, high) > LARGEST_HALF:
            raise UnsupportedModel(f"{what} has weights beyond float16's range: use --dtype float32")
