"""A model's tensors for the native executor: where each lies in its file, its rows in panels. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.models.dequant import bfloat16_to_float32, dequantise
from baton.models.description import DecoderConfig
from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.ggml_types import GgmlType
from baton.models.gguf import GgufFile
from baton.models.safetensors_file import SafetensorsModel, StoredTensor
from baton.runner.native_blocks import kind_of, pack_blocks, pack_floats
from baton_kernels.cpu.packing import Kind, PackedMatrix

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Values of a matrix that are packed at once: what this costs in memory does not grow with the model.
_CHUNK_VALUES = 1 << 23

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
LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER_NORMS = ("attention_norm", "ffn_norm")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix that is to be packed."""

    name: str  # of ours: `embedding`, `head`, `layers.n.q`, ...
    rows: int
    columns: int
    kind: Kind


class Source(Protocol):
    """A model file, asked by our names."""

    def matrices(self) -> list[Matrix]: ...

    def packed(self, matrix: Matrix) -> Iterator[PackedMatrix]:
        """Its panels, some rows at a time."""

    def vector(self, name: str) -> Floats: ...


def open_source(path: Path, config: DecoderConfig) -> Source:
    """The weights in a GGUF file or a safetensors folder.

    Raises:
        ModelFileError: it cannot be read, or lacks a tensor.
        UnsupportedModel: the config asks for what the native kernels do not have.
    """
    if config.attention_bias or config.qk_norm:
        asked = "biases in attention" if config.attention_bias else "norms of q and k"
        raise UnsupportedModel(f"{path}: {asked} are not supported")
    return _Safetensors(path, config) if path.is_dir() else _Gguf(path, config)


def matrix_names(config: DecoderConfig) -> list[str]:
    outside = ["embedding"] if config.tied_embeddings else ["embedding", "head"]
    return outside + [f"layers.{n}.{kind}" for n in range(config.layers) for kind in LAYER_MATRICES]


def vector_names(config: DecoderConfig) -> list[str]:
    return ["final_norm"] + [f"layers.{n}.{kind}" for n in range(config.layers) for kind in LAYER_NORMS]


def shape_of(config: DecoderConfig, name: str) -> tuple[int, ...]:
    """The shape that a tensor of this name must have."""
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
    return shapes.get(name.rpartition(".")[2], (config.hidden,))


def _stored_name(name: str, names: dict[str, str], layer_prefix: str) -> str:
    parts = name.split(".")
    return names[parts[-1]] if len(parts) == 1 else f"{layer_prefix}{parts[1]}.{names[parts[2]]}"


def _check_shape(path: Path, stored: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelFileError(f"{path}: tensor {stored!r} has shape {list(shape)}, not {list(expected)}")


def _check_finite(path: Path, stored: str, values: npt.NDArray[np.floating]) -> None:
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"{path}: tensor {stored!r} holds NaN or infinity: the file is damaged, pull it again"
        )


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Whole panels of rows."""
    each = max(8, _CHUNK_VALUES // columns // 8 * 8)
    return (slice(start, min(start + each, rows)) for start in range(0, rows, each))


class _Gguf:
    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self._path = path
        self._config = config
        self._file = GgufFile.open(path)

    def matrices(self) -> list[Matrix]:
        made = []
        for name in matrix_names(self._config):
            kind, (rows, columns), _ = self._find(name)
            made.append(Matrix(name, rows, columns, kind_of(kind)))
        return made

    def packed(self, matrix: Matrix) -> Iterator[PackedMatrix]:
        kind, shape, stored = self._find(matrix.name)
        raw = self._file.raw(stored)
        if self._config.qk_interleaved and matrix.name.rpartition(".")[2] in ("q", "k"):
            # llama.cpp has RoPE's pairs side by side; rows move, blocks stay as they are.
            each = raw.size // shape[0]
            raw = raw.reshape(-1, self._config.head_dim // 2, 2, each).swapaxes(1, 2).reshape(-1)
        by_row = raw.reshape(shape[0], -1)
        for rows in _row_chunks(shape[0], shape[1]):
            part = np.ascontiguousarray(by_row[rows])
            self._check(kind, part, stored)
            yield pack_blocks(kind, part, len(part), shape[1], stored)

    def vector(self, name: str) -> Floats:
        kind, shape, stored = self._find(name)
        values = dequantise(kind, self._file.raw(stored), shape)
        _check_finite(self._path, stored, values)
        return values

    def _check(self, kind: GgmlType, raw: Bytes, stored: str) -> None:
        """Blocks hold NaN or infinity only in their scales and minima, which are float16."""
        if kind.block_values == 1:
            _check_finite(self._path, stored, dequantise(kind, raw, (raw.size // kind.block_bytes,)))
            return
        blocks = raw.reshape(-1, kind.block_bytes)
        affine = kind in (GgmlType.Q4_1, GgmlType.Q5_1, GgmlType.Q4_K, GgmlType.Q5_K)
        scales = blocks[:, 208:210] if kind == GgmlType.Q6_K else blocks[:, : 4 if affine else 2]
        _check_finite(self._path, stored, np.ascontiguousarray(scales).view("<f2"))

    def _find(self, name: str) -> tuple[GgmlType, tuple[int, ...], str]:
        stored = _stored_name(name, _GGUF_NAMES, "blk.")
        info = self._file.tensors.get(stored)
        if info is None:
            raise ModelFileError(f"{self._path}: lacks the tensor {stored!r}")
        _check_shape(self._path, stored, info.shape, shape_of(self._config, name))
        return info.type, info.shape, stored


class _Safetensors:
    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self._path = path
        self._config = config
        self._model = SafetensorsModel.open(path)

    def matrices(self) -> list[Matrix]:
        made = []
        for name in matrix_names(self._config):
            rows, columns = self._find(name).shape
            made.append(Matrix(name, rows, columns, Kind.Q8_HALF))
        return made

    def packed(self, matrix: Matrix) -> Iterator[PackedMatrix]:
        tensor = self._find(matrix.name)
        data = tensor.data.reshape(matrix.rows, -1)
        for rows in _row_chunks(matrix.rows, matrix.columns):
            part = _as_floats(tensor.dtype, data[rows])
            _check_finite(self._path, tensor.name, part)
            yield pack_floats(part.reshape(-1, matrix.columns), tensor.name)

    def vector(self, name: str) -> Floats:
        tensor = self._find(name)
        values = _as_floats(tensor.dtype, tensor.data)
        _check_finite(self._path, tensor.name, values)
        return values

    def _find(self, name: str) -> StoredTensor:
        stored = _stored_name(name, _HF_NAMES, "model.layers.")
        tensor = self._model.tensors.get(stored)
        if tensor is None:
            raise ModelFileError(f"{self._path}: lacks the tensor {stored!r}")
        _check_shape(self._path, stored, tensor.shape, shape_of(self._config, name))
        return tensor


def _as_floats(dtype: str, data: Bytes) -> Floats:
    data = np.ascontiguousarray(data).reshape(-1)
    if dtype == "BF16":
        return bfloat16_to_float32(data)
    return data.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)
