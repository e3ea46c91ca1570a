"""What a step of the native engine costs: make bench-engine, or python benchmarks/cpu.py [--threads N] ...

For each shape a table of its operations, with the share of the roofline: the time that the operation would
take if it did nothing but read its bytes, or nothing but multiply, whichever is longer, at the rates that all
threads together reach here, measured first. Figures are the lower quartile of many runs; only a machine that
does nothing else gives good ones.
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
from engine import Bench

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.catalogue import default_cache_dir, resolve
from baton.models.config import load_config
from baton.models.description import DecoderConfig
from baton.runner.native_runner import NativeRunner
from baton_kernels.cpu.build import build
from baton_kernels.cpu.library import Library

PER_LAYER = ("q, k, v", "attention", "o", "gate, up", "down")
ENOUGH = 0.7  # of the roofline; below, the reason is named


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


@dataclass(frozen=True)
class Peaks:
    """What all threads together can do a second."""

    reads: float  # bytes
    bytes: float  # multiplications of bytes
    floats: float  # multiply-adds of float32

    def least(self, read: float, multiplied: float, floats: float) -> float:
        """Seconds that so much work takes at least."""
        return max(read / self.reads, multiplied / self.bytes, floats / self.floats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelSettings().name)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=200, help="of a decode step; a tenth of a prefill")
    args = parser.parse_args()
    settings = Settings(
        model=ModelSettings(name=args.model), worker=WorkerSettings(threads=args.threads, max_sequences=64)
    )
    runner = NativeRunner(settings)
    config = load_config(resolve(args.model).path)
    pool = KvPool.create_private(runner.geometry, 16 * (1_024 // 16 + 1) + 1)
    one = np.random.default_rng(0).standard_normal(pool.block_bytes // 2) * 0.5
    pool.data[:] = one.astype(np.float16).view(np.uint8)
    runner.attach(pool)
    peaks = measure_peaks(Library(build(default_cache_dir())), args.threads)
    print(
        f"{args.model}, {args.threads} threads: they read {peaks.reads / 1e9:.0f} GB/s, "
        f"multiply {peaks.bytes / 1e9:.0f} G bytes/s and {peaks.floats / 1e9:.0f} G floats/s"
    )
    measure = Measure(runner, config, peaks)
    for shape in SHAPES:
        if shape.context + shape.tokens <= config.max_context:
            measure.show(shape, args.runs if shape.tokens == 1 else max(args.runs // 10, 1))
    print("\nscheduling, sampling (greedy) and marshalling, through Engine.step:")
    for sequences, goal in ((1, 150), (16, 1_000)):
        print(f"  {sequences:2} sequences {overhead_us(runner, settings, sequences):6.0f} us (goal {goal})")
    runner.close()


class Measure:
    """Runs shapes and prints their tables."""

    def __init__(self, runner: NativeRunner, config: DecoderConfig, peaks: Peaks) -> None:
        self._runner = runner
        self._config = config
        self._peaks = peaks
        self._seconds = np.ctypeslib.as_array(runner.profile())

    def show(self, shape: Shape, runs: int) -> None:
        plan = plan_of(shape, self._runner)
        steps, operations = [], []
        for _ in range(runs):
            ctypes.memset(self._seconds.ctypes.data, 0, self._seconds.nbytes)
            started = time.perf_counter()
            self._runner.logits(plan)
            steps.append(time.perf_counter() - started)
            operations.append(self._seconds.copy())
        whole = float(np.quantile(steps, 0.25))
        each = np.quantile(operations, 0.25, axis=0)
        rows = shape.sequences * shape.tokens
        print(f"\n{shape.name}: {whole * 1e3:.2f} ms, {rows / whole:.0f} tokens/s")
        layers = each[1:-1].reshape(-1, len(PER_LAYER)).sum(axis=0)
        for name, seconds in zip((*PER_LAYER, "head"), (*layers, each[-1]), strict=True):
            share = self._least(name, shape) / seconds
            why = "" if share >= ENOUGH else f"  {reason(name, shape)}"
            print(f"  {name:10} {seconds * 1e3:8.3f} ms  {share:5.0%} of the roofline{why}")

    def _least(self, name: str, shape: Shape) -> float:
        config = self._config
        if name == "attention":
            pairs = shape.sequences * shape.tokens * (shape.context + (shape.tokens + 1) / 2) * config.layers
            kept = shape.sequences * (shape.context + shape.tokens) * config.layers
            read = kept * 4 * config.kv_heads * config.head_dim
            return self._peaks.least(read, 0, pairs * 2 * config.heads * config.head_dim)
        values, weights = self._weights(name)
        rows = shape.sequences * (1 if name == "head" else shape.tokens)
        return self._peaks.least(weights, values * rows, 0)

    def _weights(self, name: str) -> tuple[float, float]:
        """Weights of an operation over all layers, and their bytes in panels."""
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        rows, columns, times, tensor = {
            "q, k, v": (queries + 2 * keys, config.hidden, config.layers, "layers.0.q"),
            "o": (config.hidden, queries, config.layers, "layers.0.o"),
            "gate, up": (2 * config.ffn, config.hidden, config.layers, "layers.0.gate"),
            "down": (config.hidden, config.ffn, config.layers, "layers.0.down"),
            "head": (config.vocab_size, config.hidden, 1, "embedding" if config.tied_embeddings else "head"),
        }[name]
        values = float(rows) * columns * times
        return values, values * self._runner.weights.bytes_a_value(tensor)


def reason(name: str, shape: Shape) -> str:
    """Why an operation of this shape may be below what the machine could do."""
    if name == "attention":
        if shape.tokens == 1:
            return "(16-bit keys and values are widened first, and exp is a polynomial of 8 terms)"
        return "(a tile of keys and values is turned and widened before it is used)"
    if name == "head" and shape.sequences > 1:
        return "(8-bit weights are multiplied in two passes of 4 bits)"
    if shape.sequences * shape.tokens == 1:
        return "(norm, quantisation and the start of a phase; the operation takes some microseconds)"
    return "(8 multiplications come with 8 loads, 7 additions and 8 instructions of scaling)"


def plan_of(shape: Shape, runner: NativeRunner) -> StepPlan:
    rng = np.random.default_rng(1)
    size = runner.geometry.block_size
    each = -(-(shape.context + shape.tokens) // size)
    slices = []
    for number in range(shape.sequences):
        tokens = [int(token) for token in rng.integers(0, runner.model.vocab_size, shape.tokens)]
        blocks = list(range(number * each, (number + 1) * each))
        slices.append(Slice((str(number), 0, 0), tokens, shape.context, blocks, None))
    return StepPlan(1, slices)


def overhead_us(runner: NativeRunner, settings: Settings, sequences: int, steps: int = 100) -> float:
    """What `Engine.step` takes beside the operations."""
    bench = Bench(runner, settings)
    seconds = np.ctypeslib.as_array(runner.profile())
    for _ in range(sequences):
        bench.add(160, steps + 160)
    taken: list[float] = []
    while len(taken) < steps:
        before = seconds.sum()
        whole, tokens = bench.step()
        if tokens == sequences:
            taken.append(whole - (seconds.sum() - before))
    return float(np.quantile(taken, 0.25)) * 1e6


def measure_peaks(library: Library, threads: int) -> Peaks:
    """The most that all threads together reach in one of many short runs."""
    memory = np.ones(threads << 26, dtype=np.uint8)  # 64 MB each, far more than the caches
    starts = [memory.ctypes.data + (number << 26) for number in range(threads)]
    return Peaks(
        reads=rate(lambda number: library.read_bytes(starts[number], 1 << 26), threads),
        bytes=rate(lambda _: library.multiply_bytes(1_000_000), threads),
        floats=rate(lambda _: library.multiply_floats(1_000_000), threads),
    )


def rate(work: Callable[[int], int], threads: int, runs: int = 15) -> float:
    """Units of work a second, of all threads."""
    best = 0.0
    for _ in range(runs):
        gate, done = threading.Barrier(threads), [(0, 0.0, 0.0)] * threads

        def one(number: int, gate: threading.Barrier, done: list[tuple[int, float, float]]) -> None:
            gate.wait()
            began = time.perf_counter()
            done[number] = (work(number), began, time.perf_counter())

        each = [threading.Thread(target=one, args=(number, gate, done)) for number in range(threads)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
        took = max(end for _, _, end in done) - min(began for _, began, _ in done)
        best = max(best, sum(count for count, _, _ in done) / took)
    return best


if __name__ == "__main__":
    main()
