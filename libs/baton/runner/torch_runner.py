"""The model by torch operations on a CPU: the reference executor, and the one that runs anywhere."""

from __future__ import annotations

import logging
import os
import platform
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from baton.config.settings import Settings
from baton.engine.plan import Sampled, Slice, StepPlan, StepResult
from baton.engine.sampling import sample
from baton.engine.scoring import score_slice
from baton.kvcache.fingerprint import fingerprint, weights_hash
from baton.kvcache.pool import KvPool
from baton.models.catalogue import default_cache_dir, resolve
from baton.models.config import load_config
from baton.models.decoder import Decoder, PagedKv
from baton.models.weights import load_weights
from baton.protocol.liveness import Geometry
from baton.runner.fitting import check_pool, model_info, num_blocks
from baton_kernels import CONTRACT
from baton_kernels.attention_plan import Span
from baton_kernels.linear import has_half_path
from baton_kernels.rows import numerics

log = logging.getLogger(__name__)

Dtype = Literal["float16", "float32"]
_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_WARM_UP_TOKENS = 40  # a chunk over several blocks
_WARM_UP_ROWS = range(1, 17)  # decode batches whose GEMM row counts are looked for beforehand


class TorchRunner:
    """A `Runner` over a `Decoder`. Loads the model when made."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            ModelError: the model is not there, damaged, or not supported.
            ValueError: settings that this model or machine cannot meet; the text names the option.
        """
        torch.set_num_threads(settings.worker.threads or os.cpu_count() or 1)
        found = resolve(settings.model.name, settings.model.cache_dir)
        if found.kind == "mock":
            raise ValueError(f"{settings.model.name!r} is no model for the torch engine: use --engine mock")
        config = load_config(found.path)
        dtype, kv_dtype = _choose_dtypes(settings)
        half = dtype == "float16"
        page = (config.layers, 2, config.kv_heads, settings.model.block_size, config.head_dim)
        self._page = page
        self._kv_dtype = _DTYPES[kv_dtype]
        values = page[0] * page[1] * page[2] * page[3] * page[4]
        self.geometry = Geometry(
            block_size=settings.model.block_size,
            block_bytes=values * self._kv_dtype.itemsize,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=kv_dtype,
        )
        self.num_blocks = num_blocks(settings, self.geometry)
        self.model = model_info(settings, found, config)
        self.fingerprint = fingerprint(
            weights=weights_hash(found.path, default_cache_dir(settings.model.cache_dir)),
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=settings.model.block_size,
            contract=CONTRACT,
            tuning=f"torch {torch.__version__} {platform.machine()} {numerics(half)}",
        )
        with torch.inference_mode():
            weights = load_weights(found.path, config)
            threads = torch.get_num_threads()
            self._decoder: Decoder | None = Decoder(config, weights, half=half, threads=threads)
        self._kv: PagedKv | None = None
        log.info("%s loaded: weights %s, KV %s, %d threads", found.name, dtype, kv_dtype, threads)

    def attach(self, pool: KvPool) -> None:
        """Use this pool's pages.

        Raises:
            ValueError: the pool's blocks are not of this runner's geometry.
        """
        check_pool(pool, self.geometry)
        self._kv = self._view(pool)

    def warm_up(self) -> None:
        """A chunk and a batch of decodes on a pool of its own: real pages are not touched."""
        size = self.geometry.block_size
        each = -(-(_WARM_UP_TOKENS + 1) // size)
        kv = self._view(KvPool.create_private(self.geometry, each))
        blocks = list(range(each))
        prompt = Slice(("warm-up", 0, 0), [0] * _WARM_UP_TOKENS, 0, blocks, None)
        self._forward([prompt], [0], kv)
        for rows in _WARM_UP_ROWS:  # all write the same token to the same place
            token = Slice(("warm-up", 0, 0), [0], _WARM_UP_TOKENS, blocks, None)
            self._forward([token] * rows, [rows - 1], kv)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute every slice: write its K and V to its pages, and sample where asked.

        Raises:
            RuntimeError: no pool is attached, or the runner is closed.
        """
        if self._kv is None:
            raise RuntimeError("a runner needs a pool before its first step: call attach()")
        result = StepResult([None] * len(plan.slices))
        plain = [number for number, part in enumerate(plan.slices) if part.score is None]
        slices = [plan.slices[number] for number in plain]
        wanted = [at for at, part in enumerate(slices) if part.sample is not None]
        if slices:
            logits = self._forward(slices, wanted, self._kv).numpy()
            for row, at in zip(logits, wanted, strict=True):
                result.samples[plain[at]] = self._sample(row, slices[at])
        for number, part in enumerate(plan.slices):
            if part.score is not None:
                result.scores[number], row = score_slice(part, self._all_rows)
                result.samples[number] = self._sample(row, part)
        return result

    def _sample(self, row: npt.NDArray[np.float32], part: Slice) -> Sampled | None:
        return None if part.sample is None else sample(row[: self.model.vocab_size], part.sample)

    def _all_rows(self, part: Slice) -> npt.NDArray[np.float32]:
        """Computes a slice; the logits of all its tokens, float32 [tokens, vocab_size]."""
        assert self._kv is not None and self._decoder is not None
        span = Span(0, len(part.tokens), part.start, part.blocks)
        with torch.inference_mode():
            batch = self._decoder.batch(part.tokens, [span], range(len(part.tokens)), self._page)
            rows: npt.NDArray[np.float32] = self._decoder.forward(batch, self._kv).numpy()
        return rows[:, : self.model.vocab_size]

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """What `execute` would sample from: float32 [slices, vocab rows], of each slice's last token.

        Writes K and V as `execute` does.
        """
        if self._kv is None:
            raise RuntimeError("a runner needs a pool before its first step: call attach()")
        return self._forward(plan.slices, list(range(len(plan.slices))), self._kv)

    def close(self) -> None:
        """Let go of the model and the pool's pages. Idempotent."""
        self._decoder = None
        self._kv = None

    def _view(self, pool: KvPool) -> PagedKv:
        storage = torch.from_numpy(pool.data.reshape(-1)).view(self._kv_dtype)
        return PagedKv(storage, self._page)

    def _forward(self, slices: list[Slice], wanted: list[int], kv: PagedKv) -> torch.Tensor:
        """Logits float32 [wanted, vocab rows] of the last token of the slices named by `wanted`, in order."""
        if self._decoder is None:
            raise RuntimeError("the runner is closed")
        order = sorted(range(len(slices)), key=lambda number: len(slices[number].tokens) > 1)
        ids: list[int] = []
        spans = []
        last = [0] * len(slices)
        for number in order:
            part = slices[number]
            spans.append(Span(len(ids), len(part.tokens), part.start, part.blocks))
            ids.extend(part.tokens)
            last[number] = len(ids) - 1
        with torch.inference_mode():
            batch = self._decoder.batch(ids, spans, [last[number] for number in wanted], self._page)
            return self._decoder.forward(batch, kv)


def _choose_dtypes(settings: Settings) -> tuple[Dtype, Dtype]:
    """Formats of weights and KV cache."""
    dtype = settings.model.dtype
    if dtype == "auto":
        dtype = "float16" if has_half_path() else "float32"
        if dtype == "float32":
            log.info(
                "this CPU or torch build has no FBGEMM float16 path: float32 weights, about twice as slow"
            )
    elif dtype == "float16" and not has_half_path():
        raise ValueError("this CPU or torch build has no FBGEMM float16 path: use --dtype float32")
    kv_dtype = settings.model.kv_dtype
    if dtype not in ("float16", "float32"):
        raise ValueError(
            f"--model-dtype {dtype}: the torch engine takes float16 or float32, or use --engine triton"
        )
    if kv_dtype not in ("auto", "float16", "float32"):
        raise ValueError(
            f"--model-kv-dtype {kv_dtype}: the torch engine takes float16 or float32, or use --engine triton"
        )
    return dtype, dtype if kv_dtype == "auto" else kv_dtype
