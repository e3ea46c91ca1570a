"""Speed of the engine with a model: `baton bench engine [--model NAME] [--dtype D] [--threads N] ...`.

Runs `Engine` and the torch runner in this process, without services: prompts of several lengths read one at
a time, then decodes of several batch sizes. Prints tokens a second and milliseconds a step (medians).
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import sys
import time

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.kvcache.pool import KvPool
from baton.models.errors import ModelError
from baton.models.pull import pull
from baton.protocol.sampling import SamplingParams
from baton.runner.base import Runner
from baton.runner.create import create

CONTEXT = 160  # tokens before the first measured decode


class Bench:
    """An engine, its runner and a pool, driven step by step."""

    def __init__(self, runner: Runner, settings: Settings) -> None:
        self.runner = runner
        self.vocab = runner.model.vocab_size
        worker = settings.worker
        pool = KvPool.create_private(runner.geometry, runner.num_blocks)
        runner.attach(pool)
        config = EngineConfig(
            fingerprint=runner.fingerprint,
            max_context=runner.model.max_context,
            max_batch_tokens=worker.max_batch_tokens,
            max_sequences=worker.max_sequences,
            prefix_cache=False,
        )
        blocks = BlockPool(runner.num_blocks, runner.geometry.block_size, pool.generations)
        self.engine = Engine(config, blocks)
        self._random = random.Random(0)
        self._count = 0

    def add(self, prompt: int, output: int) -> None:
        """Queues a sequence of random tokens that ends by its length only."""
        self._count += 1
        tokens = [self._random.randrange(self.vocab) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        self.engine.add(Sequence(f"bench-{self._count}", 0, tokens, prompt, sampling))

    def step(self) -> tuple[float, int]:
        """Seconds of one step, scheduling and sampling included, and the tokens it computed."""
        began = time.perf_counter()
        plan = self.engine.schedule(began)
        if plan is None:
            raise RuntimeError("the KV pool is too small for this measurement: raise --kv-memory-mb")
        self.engine.commit(plan, self.runner.execute(plan), time.perf_counter())
        return time.perf_counter() - began, plan.num_tokens

    def prefill(self, prompt: int, repeats: int) -> float:
        """Median seconds from an empty engine to the first token of one prompt."""
        taken = []
        for _ in range(repeats):
            self.add(prompt, 1)
            seconds = 0.0
            while self.engine.has_work:
                seconds += self.step()[0]
            taken.append(seconds)
        return statistics.median(taken)

    def decode(self, sequences: int, steps: int) -> float:
        """Median seconds a step in which `sequences` decode."""
        for _ in range(sequences):
            self.add(CONTEXT, 2 * CONTEXT + steps)
        taken: list[float] = []
        while len(taken) < steps:
            seconds, tokens = self.step()
            if tokens == sequences:
                taken.append(seconds)
        for number in range(self._count):
            self.engine.abort(f"bench-{number + 1}", 0)
        return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="baton bench engine", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kv-memory-mb", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=256, help="token budget a step")
    parser.add_argument("--prompts", type=int, nargs="*", default=[130, 512], metavar="TOKENS")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 4, 16], metavar="N")
    parser.add_argument("--steps", type=int, default=40, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=3, help="times each prompt is read")
    args = parser.parse_args()
    settings = Settings(
        model=ModelSettings(name=args.model, dtype=args.dtype),
        worker=WorkerSettings(
            threads=args.threads,
            kv_memory_mb=args.kv_memory_mb,
            max_batch_tokens=args.batch_tokens,
            max_sequences=max([64, *args.sequences]),
        ),
    )
    try:
        pull(args.model)
        began = time.perf_counter()
        runner = create(settings)
    except (ModelError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    loaded = time.perf_counter() - began
    bench = Bench(runner, settings)
    runner.warm_up()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (
        2**20 if sys.platform == "darwin" else 2**10
    )
    print(f"{args.model}, {args.threads} threads: loaded in {loaded:.1f} s, {peak} MB at most", flush=True)
    for prompt in args.prompts:
        seconds = bench.prefill(prompt, args.repeats)
        print(
            f"prefill {prompt:5} tokens: {prompt / seconds:7.0f} tok/s  {seconds * 1e3:8.1f} ms", flush=True
        )
    for sequences in args.sequences:
        seconds = bench.decode(sequences, args.steps)
        rate = sequences / seconds
        print(
            f"decode {sequences:3} sequences: {rate:7.0f} tok/s  {seconds * 1e3:8.1f} ms a step", flush=True
        )
    runner.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
