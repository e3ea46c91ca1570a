"""The model by Triton kernels: on an NVIDIA GPU, or for tests under Triton's interpreter."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from baton.config.settings import Settings
from baton.engine.plan import Slice, StepPlan, StepResult
from baton.engine.scoring import ROWS, score_slice
from baton.kvcache.fingerprint import fingerprint, weights_hash
from baton.kvcache.pool import KvPool
from baton.models.catalogue import default_cache_dir, resolve
from baton.models.config import DecoderConfig, load_config
from baton.models.errors import UnsupportedModel
from baton.models.weights import load_weights
from baton.protocol.liveness import Geometry
from baton.runner.fitting import check_pool, model_info, num_blocks
from baton.runner.triton_decoder import TritonDecoder
from baton.runner.triton_device import ensure_memory, open_device, told_when_full
from baton.runner.triton_mirror import DeviceMirror
from baton.runner.triton_sampling import choose
from baton.runner.triton_step import SPLIT
from baton.runner.triton_steps import Steps
from baton.runner.triton_tuning import Tuning
from baton.runner.triton_weights import load_on_device
from baton_kernels.gpu import CONTRACT
from baton_kernels.gpu.attention_plan import TILE_ROWS
from baton_kernels.gpu.pages import KvFormat, PageShape
from baton_kernels.gpu.quantise import WeightFormat

log = logging.getLogger(__name__)

_COMPUTE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_WARM_UP_TOKENS = 40  # a chunk over several blocks
_HEAD_DIMS = range(16, 257, 2)


class TritonRunner:
    """A `Runner` over `TritonDecoder`. Loads the model when made."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            GpuUnusable: no GPU that the kernels can run on, or one with too little memory.
            ModelError: the model is not there, damaged, or not supported.
            ValueError: settings that this engine cannot meet; the text names the option.
        """
        found = resolve(settings.model.name, settings.model.cache_dir)
        if found.kind == "mock":
            raise ValueError(f"{settings.model.name!r} is no model for the GPU engine: use --engine mock")
        self._device = open_device()
        config = load_config(found.path)
        _check(config, str(found.path))
        cache_dir = default_cache_dir(settings.model.cache_dir)
        compute, format, kv_format = _formats(settings)
        self._compute, self._limits = _COMPUTE[compute], settings.worker
        self._shape = PageShape(
            config.layers, config.kv_heads, settings.model.block_size, config.head_dim, kv_format
        )
        self.geometry = Geometry(
            block_size=self._shape.block_size,
            block_bytes=self._shape.block_bytes,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=kv_format,
        )
        self.num_blocks = num_blocks(settings, self.geometry)
        self.model = model_info(settings, found, config)
        pool_bytes = self.num_blocks * self.geometry.block_bytes
        ensure_memory(
            self._device, pool_bytes + _weight_bytes(config, format, compute), settings.worker.kv_memory_mb
        )
        tuning = Tuning(self._device, cache_dir)
        with torch.inference_mode(), told_when_full(settings.worker.kv_memory_mb):
            weights = load_on_device(
                config, load_weights(found.path, config), self._device, self._compute, format, tuning.choose
            )
        self.fingerprint = fingerprint(
            weights=weights_hash(found.path, cache_dir),
            dtype=f"{compute} {format}",
            kv_dtype=kv_format,
            block_size=self._shape.block_size,
            contract=CONTRACT,
            tuning=f"{tuning.name} split {SPLIT}",
        )
        self._decoder: TritonDecoder | None = TritonDecoder(config, weights)
        self._mirror: DeviceMirror | None = None
        self._steps: Steps | None = None
        log.info(
            "%s loaded on %s: %s, weights %s, KV %s", found.name, self._device, compute, format, kv_format
        )

    def attach(self, pool: KvPool) -> None:
        """Use this pool's pages, by a twin of it in device memory.

        Raises:
            ValueError: the pool's blocks are not of this runner's geometry.
        """
        check_pool(pool, self.geometry)
        with told_when_full(self._limits.kv_memory_mb):
            self._mirror = DeviceMirror(pool, self._shape, self._device)
            self._steps = self._made_steps(self._mirror)

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs; on the real pool's twin, but no block of it is written."""
        steps, _ = self._attached()
        with torch.inference_mode(), told_when_full(self._limits.kv_memory_mb):
            steps.prepare(self._limits.max_sequences if self._device.type == "cuda" else 1)
            private = DeviceMirror(KvPool.create_private(self.geometry, 8), self._shape, self._device)
            tokens = min(_WARM_UP_TOKENS, self.model.max_context, 8 * self.geometry.block_size)
            prompt = Slice(("warm-up", 0, 0), [0] * tokens, 0, list(range(8)), None)
            self._made_steps(private).run([prompt], [0])

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute every slice: write its K and V to its pages, and sample where asked.

        Raises:
            RuntimeError: no pool is attached, or the runner is closed.
        """
        steps, mirror = self._attached()
        result = StepResult([None] * len(plan.slices))
        plain = [number for number, part in enumerate(plan.slices) if part.score is None]
        slices = [plan.slices[number] for number in plain]
        specs = [(at, part.sample) for at, part in enumerate(slices) if part.sample is not None]
        with torch.inference_mode():
            mirror.bring_up(plan.slices)
            if slices:
                logits = steps.run(slices, [at for at, _ in specs])
                chosen = choose(logits, self.model.vocab_size, [spec for _, spec in specs])
                for (at, _), sampled in zip(specs, chosen, strict=True):
                    result.samples[plain[at]] = sampled
            for number, part in enumerate(plan.slices):
                if part.score is not None:
                    self._score(number, part, result)
            mirror.wrote(plan.slices)
        return result

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """What `execute` would sample from: float32 [slices, vocab rows], of each slice's last token.

        Writes K and V as `execute` does.
        """
        steps, mirror = self._attached()
        with torch.inference_mode():
            mirror.bring_up(plan.slices)
            rows = steps.run(plan.slices, range(len(plan.slices))).cpu().clone()
            mirror.wrote(plan.slices)
        return rows

    def close(self) -> None:
        """Let go of the model and the pool's pages. Idempotent."""
        if self._mirror is not None:
            self._mirror.close()
        self._decoder = self._steps = self._mirror = None

    def _score(self, number: int, part: Slice, result: StepResult) -> None:
        steps, _ = self._attached()

        def compute(piece: Slice) -> npt.NDArray[np.float32]:
            rows: npt.NDArray[np.float32] = steps.all_rows(piece).cpu().numpy()
            return rows[:, : self.model.vocab_size]

        result.scores[number], row = score_slice(part, compute)
        if part.sample is not None:
            (result.samples[number],) = choose(
                torch.from_numpy(row[None].copy()).to(self._device), self.model.vocab_size, [part.sample]
            )

    def _made_steps(self, mirror: DeviceMirror) -> Steps:
        if self._decoder is None:
            raise RuntimeError("the runner is closed")
        rows = max(self._limits.max_batch_tokens, self._limits.max_sequences, ROWS)
        return Steps(self._decoder, mirror.pages, self._device, self._compute, rows=rows)

    def _attached(self) -> tuple[Steps, DeviceMirror]:
        if self._decoder is None:
            raise RuntimeError("the runner is closed")
        if self._steps is None or self._mirror is None:
            raise RuntimeError("a runner needs a pool before its first step: call attach()")
        return self._steps, self._mirror


def _formats(settings: Settings) -> tuple[str, WeightFormat, KvFormat]:
    """Types of activations, weights and KV cache."""
    dtype, stored = settings.model.dtype, settings.model.kv_dtype
    formats: dict[str, WeightFormat] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
    compute = dtype if dtype in _COMPUTE else "bfloat16"
    asked: dict[str, KvFormat] = {"int8": "int8", "fp8": "fp8", "float32": "float32", "float16": "float16"}
    kv: KvFormat = asked.get(compute if stored == "auto" else stored, "bfloat16")
    if kv in _COMPUTE and kv != compute:
        raise ValueError(
            f"--model-kv-dtype {stored}: the GPU engine keeps KV as it computes, in {compute}, or int8 or fp8"
        )
    return compute, formats.get(dtype, "plain"), kv


def _check(config: DecoderConfig, source: str) -> None:
    if config.head_dim not in _HEAD_DIMS:
        raise UnsupportedModel(
            f"{source}: heads of {config.head_dim} dimensions; the GPU engine takes 16 to 256"
        )
    if config.heads // config.kv_heads > TILE_ROWS:
        raise UnsupportedModel(f"{source}: more than {TILE_ROWS} query heads share a KV head")


def _weight_bytes(config: DecoderConfig, format: WeightFormat, compute: str) -> int:
    """About what the weights take on the device."""
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layers = config.layers * config.hidden * (heads + 3 * config.ffn)
    outside = config.vocab_size * config.hidden * (1 if config.tied_embeddings else 2)
    each = _COMPUTE[compute].itemsize
    return int(layers * {"plain": each, "int4": 0.625}.get(format, 1)) + outside * each
