"""A model's weights by one set of names, read a tensor at a time, whatever the file's format calls them.

Names: `embedding`, `final_norm`, `head`, and for layer n `layers.n.` + `attention_norm`, `q`, `k`, `v`, `o`,
`ffn_norm`, `gate`, `up`, `down`. Shapes are in `DecoderConfig`. Nothing is kept: a tensor lives as long as
whoever asked for it keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.models.dequant import dequantise
from baton.models.description import DecoderConfig
from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.gguf import GgufFile
from baton.models.safetensors_file import SafetensorsModel

Floats = npt.NDArray[np.float32]

LARGEST_HALF = 65_504.0

_GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class Weights(Protocol):
    """Where a decoder gets its tensors from; called from several threads."""

    def tensor(self, name: str) -> Tensor:
        """float32 in the config's shape, contiguous, finite.

        Raises:
            ModelFileError: it is missing, misshapen, or holds NaN or infinity.
        """


class FileWeights:
    """Weights in a file: finds a tensor under the format's own name, reads it, checks it."""

    def __init__(
        self,
        source: str,
        config: DecoderConfig,
        names: dict[str, str],
        layer_prefix: str,
        read: Callable[[str], Floats | None],
    ) -> None:
        """`read` gives a tensor under the format's name, or None where there is none."""
        if config.attention_bias or config.qk_norm:
            asked = "biases in attention" if config.attention_bias else "norms of q and k"
            raise UnsupportedModel(f"{source}: {asked} are not supported")
        self._source = source
        self._config = config
        self._names = names
        self._layer_prefix = layer_prefix
        self._read = read

    def tensor(self, name: str) -> Tensor:
        if name == "head" and self._config.tied_embeddings:
            name = "embedding"
        _, layer, kind = ("", "", name) if "." not in name else name.split(".")
        stored = (f"{self._layer_prefix}{layer}." if layer else "") + self._names[kind]
        values = self._read(stored)
        if values is None:
            raise ModelFileError(f"{self._source}: lacks the tensor {stored!r}")
        expected = weight_shape(self._config, kind)
        if values.shape != expected:
            raise ModelFileError(
                f"{self._source}: tensor {stored!r} has shape {list(values.shape)}, not {list(expected)}"
            )
        if self._config.qk_interleaved and kind in ("q", "k"):
            values = deinterleaved(values, self._config.head_dim)
        result = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        low, high = torch.aminmax(result)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ModelFileError(
                f"{self._source}: tensor {stored!r} holds NaN or infinity: the file is damaged, pull it again"
            )
        return result


def weight_shape(config: DecoderConfig, kind: str) -> tuple[int, ...]:
    """The shape of a weight, by its name within a layer."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.hidden),
        "head": (config.vocab_size, config.hidden),
        "q": (queries, config.hidden),
        "k": (keys, config.hidden),
        "v": (keys, config.hidden),
        "o": (config.hidden, queries),
        "gate": (config.ffn, config.hidden),
        "up": (config.ffn, config.hidden),
        "down": (config.hidden, config.ffn),
    }
    return shapes.get(kind, (config.hidden,))


def deinterleaved(weight: Floats, head_dim: int) -> Floats:
    """q or k rows [heads * head_dim, in] from llama.cpp's order (RoPE pairs side by side) to halves."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def load_weights(path: Path, config: DecoderConfig) -> Weights:
    """The weights in a GGUF file or a safetensors folder.

    Raises:
        ModelFileError: the file cannot be read; a missing tensor is told when it is asked for.
        UnsupportedModel: the config asks for weights that the decoder does not use.
    """
    if path.is_dir():
        model = SafetensorsModel.open(path)
        return FileWeights(str(path), config, _HF_NAMES, "model.layers.", model.read)
    file = GgufFile.open(path)

    def read(name: str) -> Floats | None:
        info = file.tensors.get(name)
        return None if info is None else dequantise(info.type, file.raw(name), info.shape)

    return FileWeights(str(path), config, _GGUF_NAMES, "blk.", read)
