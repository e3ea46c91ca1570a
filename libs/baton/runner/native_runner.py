"""The model by the native CPU kernels: a step is one call, without the GIL and without torch."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.config.settings import Settings
from baton.engine.plan import Sampled, SampleSpec, Slice, StepPlan, StepResult
from baton.engine.scoring import score_slice
from baton.kvcache.fingerprint import fingerprint, weights_hash
from baton.kvcache.pool import KvPool
from baton.models.catalogue import default_cache_dir, resolve
from baton.models.config import DecoderConfig, load_config
from baton.protocol.liveness import Geometry
from baton.runner.core_ledger import CoreLedger
from baton.runner.fitting import check_pool, model_info, num_blocks
from baton.runner.native_ops import RopeTable, check, operations, shape
from baton.runner.native_sampling import NativeSampling
from baton.runner.native_step import StepArrays
from baton.runner.native_weights import load_packed
from baton_kernels.cpu import CONTRACT
from baton_kernels.cpu.build import Variant, best_variant, build
from baton_kernels.cpu.library import CStep, Executor, Library

log = logging.getLogger(__name__)

_MOST_TIMES = 4  # its own threads: what a worker keeps to be able to borrow cores
_WARM_UP_TOKENS = 40  # a chunk over several blocks


class NativeRunner:
    """A `Runner` over the compiled kernels. Loads the model when made."""

    def __init__(
        self, settings: Settings, variant: Variant | None = None, ledger: Path | None = None
    ) -> None:
        """
        Args:
            variant: of the kernels; by default the best for this CPU. All give the same bits.
            ledger: folder of the machine's core ledger, to use idle workers' cores too; by default none are.

        Raises:
            ModelError: the model is not there, damaged, or not supported.
            BuildError: the kernels cannot be compiled.
            ValueError: settings that this engine cannot meet; the text names the option.
        """
        found = resolve(settings.model.name, settings.model.cache_dir)
        if found.kind == "mock":
            raise ValueError(f"{settings.model.name!r} is no model for the native engine: use --engine mock")
        _check_dtypes(settings)
        cache_dir = default_cache_dir(settings.model.cache_dir)
        config = load_config(found.path)
        check(config, str(found.path))
        weights = weights_hash(found.path, cache_dir)
        self.geometry = _geometry(config, settings.model.block_size)
        self.num_blocks = num_blocks(settings, self.geometry)
        self.model = model_info(settings, found, config)
        self.fingerprint = fingerprint(
            weights=weights,
            dtype="native",
            kv_dtype="float16",
            block_size=settings.model.block_size,
            contract=CONTRACT,
            tuning="native",
        )
        library = Library(build(cache_dir, variant))
        self.weights = load_packed(found.path, config, weights, cache_dir)
        cores = os.cpu_count() or 1
        threads = settings.worker.threads or cores
        self._ledger = _take_seat(ledger, threads)
        self._executor: Executor = library.executor(
            shape(config, settings.model.block_size),
            operations(config, self.weights),
            threads if self._ledger is None else max(threads, min(cores, _MOST_TIMES * threads)),
        )
        if self._ledger is not None:
            self._executor.join(self._ledger.address, self._ledger.seat)
        self._arrays = StepArrays(RopeTable(config), -(-config.vocab_size // 8) * 8)
        self._sampling = NativeSampling(self.model.vocab_size)
        self._pool: KvPool | None = None
        log.info("%s loaded: %s kernels, %d threads", found.name, variant or best_variant(), threads)

    def attach(self, pool: KvPool) -> None:
        """Use this pool's pages.

        Raises:
            ValueError: the pool's blocks are not of this runner's geometry.
        """
        check_pool(pool, self.geometry)
        self._pool = pool

    def warm_up(self) -> None:
        """A chunk and a decode on a pool of its own: real pages are not touched."""
        tokens = min(_WARM_UP_TOKENS, self.model.max_context - 1)
        each = -(-(tokens + 1) // self.geometry.block_size)
        pool = KvPool.create_private(self.geometry, each)
        blocks = list(range(each))
        self._run([Slice(("warm-up", 0, 0), [0] * tokens, 0, blocks, None)], [0], pool)
        self._run([Slice(("warm-up", 0, 0), [0], tokens, blocks, None)], [0], pool)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute every slice: write its K and V to its pages, and sample where asked.

        Raises:
            RuntimeError: no pool is attached, or the runner is closed.
            ValueError: a slice names tokens or slots that do not exist.
        """
        pool, result = self._attached(), StepResult([None] * len(plan.slices))
        plain = [number for number, part in enumerate(plan.slices) if part.score is None]
        if plain:
            self._execute_plain(plan, plain, pool, result)
        for number, part in enumerate(plan.slices):
            if part.score is not None:
                result.scores[number], row = score_slice(part, lambda piece: self._run([piece], None, pool))
                if part.sample is not None:
                    result.samples[number] = self.choose(row, part.sample)
        return result

    def _execute_plain(self, plan: StepPlan, numbers: list[int], pool: KvPool, result: StepResult) -> None:
        slices = [plan.slices[number] for number in numbers]
        specs = [part.sample for part in slices if part.sample is not None]
        wanted = [at for at, part in enumerate(slices) if part.sample is not None]
        step, _ = self._arrays.lay_out(slices, wanted, pool)
        if any(spec.allowed is not None for spec in specs):  # masks are made beside the step
            self._executor.step(step)
            self._sampling.lay_out(step, specs)
            self._executor.choose(step)
        else:
            self._sampling.lay_out(step, specs)
            self._executor.step(step)
        for at, sampled in zip(wanted, self._sampling.results(), strict=True):
            result.samples[numbers[at]] = sampled

    def choose(self, logits: npt.NDArray[np.float32], spec: SampleSpec) -> Sampled:
        """Choose one token from logits, float32 [vocab_size or more], which are spoilt."""
        step = CStep(sampled=1, logits=logits.ctypes.data, logits_stride=len(logits))
        self._sampling.lay_out(step, [spec])
        self._executor.choose(step)
        return self._sampling.results()[0]

    def logits(self, plan: StepPlan) -> npt.NDArray[np.float32]:
        """What `execute` would sample from: float32 [slices, vocab_size], of each slice's last token.

        Writes K and V as `execute` does. Good until the next step.
        """
        return self._run(plan.slices, range(len(plan.slices)), self._attached())

    def profile(self) -> ctypes.Array[ctypes.c_double]:
        """From now on, seconds spent in each operation are added up here; see `native_ops.operations`."""
        return self._executor.profile()

    def close(self) -> None:
        """Let go of the model and the pool's pages. Idempotent."""
        self._executor.close()
        self._pool = None
        if self._ledger is not None:
            self._ledger.leave()

    def _attached(self) -> KvPool:
        if self._pool is None:
            raise RuntimeError("a runner needs a pool before its first step: call attach()")
        return self._pool

    def _run(
        self, slices: Sequence[Slice], wanted: Sequence[int] | None, pool: KvPool
    ) -> npt.NDArray[np.float32]:
        step, logits = self._arrays.lay_out(slices, wanted, pool)
        self._executor.step(step)
        return logits[:, : self.model.vocab_size]


def _take_seat(directory: Path | None, threads: int) -> CoreLedger | None:
    if directory is None:
        return None
    try:
        return CoreLedger(directory, threads)
    except OSError as error:
        log.warning("cores are not shared with other workers: %s", error)
        return None


def _check_dtypes(settings: Settings) -> None:
    if settings.model.dtype != "auto":
        raise ValueError(
            f"--model-dtype {settings.model.dtype}: the native engine computes with the file's own blocks, "
            "or 8 bit in groups of 32: use auto, or --engine torch"
        )
    if settings.model.kv_dtype not in ("auto", "float16"):
        raise ValueError(
            f"--model-kv-dtype {settings.model.kv_dtype}: the native engine keeps KV in float16, "
            "or use --engine torch or triton"
        )


def _geometry(config: DecoderConfig, block_size: int) -> Geometry:
    values = config.layers * 2 * config.kv_heads * block_size * config.head_dim
    return Geometry(
        block_size=block_size,
        block_bytes=values * 2,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="float16",
    )
