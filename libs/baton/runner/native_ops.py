"""A decoder as the list of operations that the native executor walks in every step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.models.config import inverse_frequencies
from baton.models.description import DecoderConfig
from baton.models.errors import UnsupportedModel
from baton.runner.native_weights import PackedWeights
from baton_kernels.cpu import library as c
from baton_kernels.cpu.library import COp, CPacked, CShape

_LARGEST_HEAD = 1_024
_LARGEST_INPUT = 65_536


def check(config: DecoderConfig, source: str) -> None:
    """
    Raises:
        UnsupportedModel: the kernels have no form for this decoder.
    """
    if config.head_dim % 8 or config.head_dim > _LARGEST_HEAD:
        raise UnsupportedModel(
            f"{source}: heads of {config.head_dim} dimensions; the native engine takes multiples of 8 "
            f"up to {_LARGEST_HEAD}: use --engine torch"
        )
    if max(config.hidden, config.ffn, config.heads * config.head_dim) > _LARGEST_INPUT:
        raise UnsupportedModel(
            f"{source}: a layer with over {_LARGEST_INPUT} inputs is too wide for the native engine: "
            "use --engine torch"
        )


def shape(config: DecoderConfig, block_size: int) -> CShape:
    return CShape(
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        layers=config.layers,
        block_size=block_size,
        vocab=config.vocab_size,
        eps=config.rms_eps,
    )


def operations(config: DecoderConfig, weights: PackedWeights) -> list[COp]:
    """The whole decoder. What follows the last attention is for sampled rows only."""
    keys_at = config.heads * config.head_dim
    values_at = keys_at + config.kv_heads * config.head_dim
    up_at = -(-config.ffn // 8) * 8
    ops = [_op(c.EMBED, weights.matrix("embedding"))]
    for layer in range(config.layers):
        prefix, last = f"layers.{layer}.", layer == config.layers - 1
        ops += [
            _op(
                c.PROJECT,
                weights.matrix(prefix + "q"),
                weights.matrix(prefix + "k", keys_at),
                weights.matrix(prefix + "v", values_at),
                source=c.NORMED,
                norm=weights.vector(prefix + "attention_norm"),
            ),
            _op(c.ATTEND, layer=layer),
            _op(
                c.PROJECT,
                weights.matrix(prefix + "o"),
                source=c.ATTENDED,
                target=c.ADD_TO_HIDDEN,
                sampled_only=last,
            ),
            _op(
                c.PROJECT,
                weights.matrix(prefix + "gate"),
                weights.matrix(prefix + "up", up_at),
                source=c.NORMED,
                norm=weights.vector(prefix + "ffn_norm"),
                sampled_only=last,
            ),
            _op(
                c.PROJECT,
                weights.matrix(prefix + "down"),
                source=c.GATED,
                target=c.ADD_TO_HIDDEN,
                sampled_only=last,
            ),
        ]
    head = "embedding" if config.tied_embeddings else "head"
    ops.append(
        _op(
            c.PROJECT,
            weights.matrix(head),
            source=c.NORMED,
            target=c.TO_LOGITS,
            norm=weights.vector("final_norm"),
            sampled_only=True,
        )
    )
    return ops


def _op(
    code: int,
    *parts: CPacked,
    source: int = 0,
    target: int = 0,
    layer: int = 0,
    norm: int = 0,
    sampled_only: bool = False,
) -> COp:
    op = COp(code, source, target, layer, int(sampled_only), len(parts), norm)
    for number, part in enumerate(parts):
        op.part[number] = part
    return op


class RopeTable:
    """Cosines and sines by position, float32 [positions, head_dim / 2], grown as positions are asked for."""

    def __init__(self, config: DecoderConfig) -> None:
        self._frequencies, self._factor = inverse_frequencies(config.rope)
        self._limit = config.max_context
        self.cos: npt.NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)
        self.sin = self.cos
        self.addresses = 0, 0  # of both
        self.reach(min(2_048, self._limit) - 1)

    def reach(self, position: int) -> None:
        """Makes sure that the tables have a row for `position`."""
        if position < len(self.cos):
            return
        length = max(position + 1, min(2 * len(self.cos), self._limit))
        angles = np.arange(length, dtype=np.float64)[:, None] * self._frequencies
        self.cos = np.ascontiguousarray(np.cos(angles) * self._factor, dtype=np.float32)
        self.sin = np.ascontiguousarray(np.sin(angles) * self._factor, dtype=np.float32)
        self.addresses = self.cos.ctypes.data, self.sin.ctypes.data
