"""Ways to drive the native runner and its kernels by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.catalogue import default_cache_dir
from baton.models.config import inverse_frequencies, load_config
from baton.models.safetensors_file import SafetensorsModel
from baton.runner.native_runner import NativeRunner
from baton_kernels.cpu.build import Variant, build
from baton_kernels.cpu.library import Library
from baton_kernels.cpu.packing import Kind, PackedMatrix
from baton_kernels.cpu.packing import quantise as pack_quantised

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FINE_FROM = 1.6  # as in quantise.h


@cache
def library(variant: Variant) -> Library:
    return Library(build(default_cache_dir(), variant))


def settings(name: str | Path, *, threads: int = 1, **model: Any) -> Settings:
    return Settings(
        model=ModelSettings(name=str(name), **model), worker=WorkerSettings(engine="native", threads=threads)
    )


def runner(
    name: str | Path, *, blocks: int = 256, threads: int = 1, variant: Variant | None = None, **model: Any
) -> NativeRunner:
    """A runner with a private pool of `blocks` blocks attached."""
    made = NativeRunner(settings(name, threads=threads, **model), variant)
    made.attach(KvPool.create_private(made.geometry, blocks))
    return made


def piece(tokens: Sequence[int], start: int, end: int, blocks: list[int], name: str = "a") -> Slice:
    """Tokens `start` to `end` of a sequence whose first `start` are computed."""
    return Slice((name, 0, 0), list(tokens[start:end]), start, blocks, None)


def logits_of(made: NativeRunner, slices: list[Slice]) -> Floats:
    """One step: float32 [slices, vocab], of each slice's last token."""
    return made.logits(StepPlan(1, slices)).copy()


def prefill(made: NativeRunner, tokens: Sequence[int], blocks: list[int], chunk: int = 0) -> Floats:
    """Logits of the last token, computed in chunks of `chunk` tokens; 0: in one."""
    chunk = chunk or len(tokens)
    result = np.empty((0, 0), dtype=np.float32)
    for start in range(0, len(tokens), chunk):
        result = logits_of(made, [piece(tokens, start, min(start + chunk, len(tokens)), blocks)])
    return result[0]


def values_of(matrix: PackedMatrix) -> Doubles:
    """What a matrix of 8-bit codes without minima stands for: float64 [rows, 32 * groups]."""
    assert matrix.kind == Kind.Q8_HALF
    tiles = matrix.data.reshape(-1, matrix.groups, matrix.kind.tile_bytes)
    scales = tiles[:, :, 256:].copy().view("<f2").astype(np.float64)  # [panels, groups, 8]
    codes = tiles[:, :, :256].reshape(-1, matrix.groups, 8, 8, 4).astype(np.float64) - 128
    rows = (codes * scales[:, :, None, :, None]).transpose(0, 3, 1, 2, 4)
    return rows.reshape(-1, matrix.groups * 32)[: matrix.rows]


def quantised(x: Doubles) -> Doubles:
    """Rows [rows, in] as linear layers see them: 8 bit in groups of 32, 16 where a group stands out."""
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 127
    fine = step > FINE_FROM * np.sqrt((step**2).mean(axis=1, keepdims=True))
    step = np.where(fine, step / 254, step)
    rounded = np.rint(groups / np.where(step > 0, step, 1)) * step
    return rounded.reshape(len(x), -1)[:, : x.shape[1]]


def reference(folder: Path, tokens: Sequence[int]) -> Doubles:
    """Logits [tokens, vocab] of a safetensors model in plain numpy: the native kernels' rounding of weights,
    activations and KV, and float64 for the rest."""
    config, model = load_config(folder), SafetensorsModel.open(folder)

    def weight(name: str) -> Doubles:
        values = model.read(f"model.{name}.weight" if name != "lm_head" else "lm_head.weight")
        assert values is not None
        return values.astype(np.float64) if values.ndim == 1 else values_of(pack_quantised(values))

    def linear(x: Doubles, name: str) -> Doubles:
        matrix = weight(name)
        return quantised(x) @ matrix[:, : x.shape[1]].T

    def norm(x: Doubles, name: str) -> Doubles:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + config.rms_eps) * weight(name)

    frequencies, factor = inverse_frequencies(config.rope)
    angles = np.arange(len(tokens))[:, None, None] * frequencies
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor

    def rotated(x: Doubles) -> Doubles:
        low, high = np.split(x.reshape(len(x), -1, config.head_dim), 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    group = config.heads // config.kv_heads
    hidden = weight("embed_tokens")[list(tokens)][:, : config.hidden]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for number in range(config.layers):
        layer = f"layers.{number}"
        x = norm(hidden, f"{layer}.input_layernorm")
        queries = rotated(linear(x, f"{layer}.self_attn.q_proj"))
        keys = rotated(linear(x, f"{layer}.self_attn.k_proj")).astype(np.float16).astype(np.float64)
        values = linear(x, f"{layer}.self_attn.v_proj").astype(np.float16).astype(np.float64)
        values = values.reshape(keys.shape).repeat(group, axis=1)
        scores = np.einsum("ihd,jhd->hij", queries, keys.repeat(group, axis=1)) / np.sqrt(config.head_dim)
        shares = np.exp(scores + future - (scores + future).max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", shares, values).reshape(len(tokens), -1)
        hidden = hidden + linear(mixed, f"{layer}.self_attn.o_proj")
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate, up = linear(x, f"{layer}.mlp.gate_proj"), linear(x, f"{layer}.mlp.up_proj")
        hidden = hidden + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")
    return linear(norm(hidden, "norm"), "embed_tokens" if config.tied_embeddings else "lm_head")


def equal_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    return a.shape == b.shape and bool((a.view(np.int32) == b.view(np.int32)).all())
