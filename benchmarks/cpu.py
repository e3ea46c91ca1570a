"""What a step of the native engine costs: python benchmarks/cpu.py [--model NAME] [--threads N] [--runs N]

For each shape: the whole step, and its operations. For a single stream with GB/s of weights against what this
machine's memory reads, measured beside; else with G multiply-adds a second. Each figure is the least of many
runs; with several threads an operation's figure misses what the first thread came late for.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import SampleSpec, Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.catalogue import resolve
from baton.models.config import load_config
from baton.models.description import DecoderConfig
from baton.protocol.sampling import SamplingParams
from baton.runner.native_runner import NativeRunner

PER_LAYER = ("q, k, v", "attention", "o", "gate, up", "down")


@dataclass(frozen=True)
class Shape:
    name: str
    sequences: int
    tokens: int  # of each, in this step
    context: int  # computed before


SHAPES = (
    Shape("1 stream, context 160", 1, 1, 160),
    Shape("1 stream, context 4,000", 1, 1, 4_000),
    Shape("4 streams, context 160", 4, 1, 160),
    Shape("16 streams, context 160", 16, 1, 160),
    Shape("16 streams, context 1,000", 16, 1, 1_000),
    Shape("prefill of 130", 1, 130, 0),
    Shape("prefill of 512", 1, 512, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelSettings().name)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=200, help="of a decode step; a tenth of a prefill")
    args = parser.parse_args()
    runner = NativeRunner(
        Settings(model=ModelSettings(name=args.model), worker=WorkerSettings(threads=args.threads))
    )
    config = load_config(resolve(args.model).path)
    pool = KvPool.create_private(runner.geometry, 16 * (1_024 // 16 + 1) + 1)
    one = np.random.default_rng(0).standard_normal(pool.block_bytes // 2) * 0.5
    pool.data[:] = one.astype(np.float16).view(np.uint8)
    runner.attach(pool)
    bandwidth = read_bandwidth(args.threads)
    print(f"{args.model}, {args.threads} threads; memory reads {bandwidth:.0f} GB/s")
    measure = Measure(runner, config, bandwidth)
    for shape in SHAPES:
        if shape.context + shape.tokens <= config.max_context:
            measure.show(shape, args.runs if shape.tokens == 1 else max(args.runs // 10, 1))
    print(f"\nlay out, sample and return, greedy: {overhead_us(runner, 1):.0f} us at 1 sequence, ", end="")
    print(f"{overhead_us(runner, 16):.0f} us at 16")
    runner.close()


class Measure:
    """Runs shapes and prints their tables."""

    def __init__(self, runner: NativeRunner, config: DecoderConfig, bandwidth: float) -> None:
        self._runner = runner
        self._config = config
        self._bandwidth = bandwidth
        self._seconds = np.ctypeslib.as_array(runner.profile())

    def show(self, shape: Shape, runs: int) -> None:
        plan = plan_of(shape, self._runner, sampled=False)
        best = np.full(len(self._seconds), np.inf)
        whole = np.inf
        for _ in range(runs):
            ctypes.memset(self._seconds.ctypes.data, 0, self._seconds.nbytes)
            started = time.perf_counter()
            self._runner.logits(plan)
            whole = min(whole, time.perf_counter() - started)
            best = np.minimum(best, self._seconds)
        rows = shape.sequences * shape.tokens
        print(
            f"\n{shape.name}: {whole * 1e3:.2f} ms, {rows / whole:.0f} tokens/s; its operations one by one:"
        )
        layers = best[1:-1].reshape(-1, len(PER_LAYER)).sum(axis=0)
        for name, seconds in zip(
            ("embedding", *PER_LAYER, "head"), (best[0], *layers, best[-1]), strict=True
        ):
            print(f"  {name:10} {seconds * 1e3:8.3f} ms{self._reached(name, shape, seconds)}")

    def _reached(self, name: str, shape: Shape, seconds: float) -> str:
        work = self._values(name)
        if not work:
            return ""
        if shape.tokens == 1 and shape.sequences == 1:
            rate = work[1] / seconds / 1e9
            return f"  {rate:6.1f} GB/s, {rate / self._bandwidth:4.0%} of memory"
        rows = shape.sequences * (1 if name == "head" else shape.tokens)
        return f"  {work[0] * rows / seconds / 1e9:6.1f} G multiply-adds/s"

    def _values(self, name: str) -> tuple[float, float] | None:
        """Weights of an operation over all layers, and their bytes in panels."""
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        rows_columns = {
            "q, k, v": (queries + 2 * keys, config.hidden, config.layers, "layers.0.q"),
            "o": (config.hidden, queries, config.layers, "layers.0.o"),
            "gate, up": (2 * config.ffn, config.hidden, config.layers, "layers.0.gate"),
            "down": (config.hidden, config.ffn, config.layers, "layers.0.down"),
            "head": (config.vocab_size, config.hidden, 1, "embedding" if config.tied_embeddings else "head"),
        }
        if name not in rows_columns:
            return None
        rows, columns, times, tensor = rows_columns[name]
        values = float(rows) * columns * times
        return values, values * self._runner.weights.bytes_a_value(tensor)


def plan_of(shape: Shape, runner: NativeRunner, *, sampled: bool) -> StepPlan:
    rng = np.random.default_rng(1)
    size = runner.geometry.block_size
    each = -(-(shape.context + shape.tokens) // size)
    slices = []
    for number in range(shape.sequences):
        tokens = [int(token) for token in rng.integers(0, runner.model.vocab_size, shape.tokens)]
        blocks = list(range(number * each, (number + 1) * each))
        spec = SampleSpec(SamplingParams(temperature=0), 0, 0, tokens, 1) if sampled else None
        slices.append(Slice((str(number), 0, 0), tokens, shape.context, blocks, spec))
    return StepPlan(1, slices)


def overhead_us(runner: NativeRunner, sequences: int) -> float:
    """What Python adds to a native step: `execute` less its operations."""
    plan = plan_of(Shape("", sequences, 1, 160), runner, sampled=True)
    seconds = np.ctypeslib.as_array(runner.profile())
    best = np.inf
    for _ in range(200):
        started, before = time.perf_counter(), seconds.sum()
        runner.execute(plan)
        best = min(best, time.perf_counter() - started - (seconds.sum() - before))
    return best * 1e6


def read_bandwidth(threads: int) -> float:
    """GB/s that all threads together read of memory far larger than the caches."""
    arrays = [np.ones(64 << 17, dtype=np.float64) for _ in range(threads)]  # 64 MB each

    def best_of(work: Callable[[], object], runs: int) -> float:
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return min(times)

    def all_at_once() -> None:
        readers = [threading.Thread(target=array.max) for array in arrays]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    return sum(array.nbytes for array in arrays) / best_of(all_at_once, 20) / 1e9


if __name__ == "__main__":
    main()
