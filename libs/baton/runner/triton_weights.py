"""A decoder's weights on the device, in the format asked for, with the tiles of each product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.models.description import DecoderConfig
from baton.models.errors import UnsupportedModel
from baton.models.rope import inverse_frequencies
from baton.models.weights import LARGEST_HALF, Weights
from baton_kernels.gpu.linear import linear
from baton_kernels.gpu.quantise import Weight, WeightFormat, quantise
from baton_kernels.gpu.tiles import Tiles

TileChoice = Callable[[Weight, torch.dtype], Tiles]


@dataclass(slots=True, frozen=True)
class Product:
    """A weight and how its product is cut."""

    weight: Weight
    tiles: Tiles

    def __call__(self, x: Tensor, out: Tensor) -> None:
        linear(x, self.weight, out, self.tiles)


@dataclass(slots=True, frozen=True)
class DeviceLayer:
    """One layer."""

    attention_norm: Tensor  # float32 [hidden]
    qkv: Product
    o: Product
    ffn_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(slots=True, frozen=True)
class DeviceWeights:
    """All of a decoder."""

    table: Tensor  # [vocab_size, hidden], the activations' type
    layers: list[DeviceLayer]
    final_norm: Tensor
    head: Product  # never in fewer bits than the activations
    cos: Tensor  # float32 [max_context, head_dim / 2]
    sin: Tensor


def load_on_device(
    config: DecoderConfig,
    weights: Weights,
    device: torch.device,
    compute: torch.dtype,
    format: WeightFormat,
    choose: TileChoice,
) -> DeviceWeights:
    """Reads, quantises and uploads a weight at a time.

    Args:
        compute: the activations' type.
        format: of the layers' matrices.
        choose: the tiles for a weight.

    Raises:
        ModelFileError: a weight is missing or damaged.
        UnsupportedModel: one does not fit the format.
    """

    def vector(name: str) -> Tensor:
        return weights.tensor(name).to(device)

    def product(kind: WeightFormat, *names: str) -> Product:
        matrix = (
            torch.cat([weights.tensor(name) for name in names])
            if len(names) > 1
            else weights.tensor(names[0])
        )
        if compute == torch.float16 and float(matrix.abs().max()) > LARGEST_HALF:
            raise UnsupportedModel(f"{names[0]} has weights beyond float16's range: use --dtype bfloat16")
        there = matrix.to(device)
        try:
            made = quantise(there.to(compute) if kind == "plain" else there, kind)
        except ValueError as error:
            raise UnsupportedModel(f"{names[0]}: {error}: use --dtype int8") from error
        return Product(made, choose(made, compute))

    layers = [
        DeviceLayer(
            attention_norm=vector(f"{at}.attention_norm"),
            qkv=product(format, f"{at}.q", f"{at}.k", f"{at}.v"),
            o=product(format, f"{at}.o"),
            ffn_norm=vector(f"{at}.ffn_norm"),
            gate_up=product(format, f"{at}.gate", f"{at}.up"),
            down=product(format, f"{at}.down"),
        )
        for at in (f"layers.{number}" for number in range(config.layers))
    ]
    head = product("plain", "embedding" if config.tied_embeddings else "head")
    table = head.weight.values if config.tied_embeddings else weights.tensor("embedding").to(device, compute)
    cos, sin = _rope_tables(config)
    return DeviceWeights(table, layers, vector("final_norm"), head, cos.to(device), sin.to(device))


def _rope_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, float32 [max_context, head_dim / 2], computed in float64."""
    frequencies, factor = inverse_frequencies(config.rope)
    angles = np.arange(config.max_context, dtype=np.float64)[:, None] * frequencies
    cos, sin = (
        torch.from_numpy((part * factor).astype(np.float32)) for part in (np.cos(angles), np.sin(angles))
    )
    return cos, sin
