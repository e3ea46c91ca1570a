"""Batch jobs measured, on the mock engine if not told otherwise: `baton bench batch [PART ...]`.

throughput   tokens a second of a job alone, against those of clients that keep the engine full
latency      first tokens of interactive requests at half of the capacity, without a job and beside one
order        a job whose requests share prefixes, in prefix order and in the order in which it came

Each part starts a cluster of its own and takes it down again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

from baton.cli.batch.upload import upload
from baton.cli.bench_cluster import cluster
from baton.cli.http import Api
from baton.cli.supervisor.rundir import RunInfo

PARTS = ("throughput", "latency", "order")
OVER = ("completed", "failed", "expired", "cancelled")


class Job:
    """A batch of these prompts."""

    def __init__(self, run: RunInfo, prompts: list[str], tokens: int, *, varied: bool = False) -> None:
        """`varied`: answers of `_length` tokens, else of `tokens`."""
        self._api = Api(run.gateway_url)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for number, prompt in enumerate(prompts):
                length = _length(number, tokens) if varied else tokens
                body = {"model": run.model, "prompt": prompt, "max_tokens": length, "ignore_eos": True}
                line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(line) + "\n")
            file.flush()
            source = upload(self._api, file.name)
        asked = {"input_file_id": source["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self.id = self._api.post("/v1/batches", asked)["id"]

    def look(self) -> dict[str, Any]:
        batch: dict[str, Any] = self._api.get(f"/v1/batches/{self.id}")
        return batch

    def progress(self) -> Iterator[tuple[float, int]]:
        """(seconds, requests done) until it is over."""
        while (batch := self.look())["status"] not in OVER:
            yield time.monotonic(), batch["request_counts"]["completed"]
            time.sleep(0.25)
        if batch["status"] != "completed" or batch["request_counts"]["failed"]:
            raise RuntimeError(f"the job did not go well: {batch}")

    def cancel(self) -> None:
        self._api.post(f"/v1/batches/{self.id}/cancel", {})


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Between 20 and 80 % of a job: what its end and its beginning look like depends on its size."""
    step_us, token_us, slots = 20_000, 20, args.slots
    own = slots / (step_us + token_us * slots) * 1e6
    flags = ("--engine", args.engine, "--worker-max-sequences", str(slots))
    flags += ("--mock-step-us", str(step_us), "--mock-token-us", str(token_us))
    prompts = [_prompt(number) for number in range(args.requests)]
    with cluster(*flags) as run:
        floods = [asyncio.run(_flood(run, 2 * slots, args))]
        done = list(Job(run, prompts, args.tokens, varied=True).progress())
        floods.append(asyncio.run(_flood(run, 2 * slots, args)))
    flood = statistics.mean(floods)
    first = next(point for point in done if point[1] >= 0.2 * args.requests)
    last = next(point for point in reversed(done) if point[1] <= 0.8 * args.requests)
    rate = (last[1] - first[1]) * args.tokens / (last[0] - first[0])
    found = {
        "tokens_s": round(rate),
        "clients_tokens_s": round(flood),
        "share": round(rate / flood, 3),
    }
    return {**found, "cost_model_tokens_s": round(own)} if args.engine == "mock" else found


def _prompt(number: int) -> str:
    return f"{number} " + "text " * 4


def _length(number: int, tokens: int) -> int:
    """Of the answer to a request: half to one and a half times `tokens`, evenly spread."""
    return tokens // 2 + number * 37 % tokens + 1


async def _flood(run: RunInfo, clients: int, args: argparse.Namespace) -> float:
    """Tokens a second of so many clients that each ask again as soon as they are answered."""
    begun = done = 0

    async def ask(session: aiohttp.ClientSession, until: float) -> None:
        nonlocal begun, done
        while time.monotonic() < until:
            length = _length(begun, args.tokens)
            begun += 1
            body = {"model": run.model, "prompt": _prompt(begun), "max_tokens": length, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            done += length

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(run.gateway_url, connector=connector) as session:
        until = time.monotonic() + 4 + args.seconds / 3
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(ask(session, until))
            await asyncio.sleep(4)
            before, began = done, time.monotonic()
            await asyncio.sleep(args.seconds / 3)
            rate = (done - before) / (time.monotonic() - began)
    return rate


async def _first_token(session: aiohttp.ClientSession, number: int, tokens: int) -> float:
    body = {
        "model": "mock",
        "prompt": f"ask {number}",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    began, first = time.perf_counter(), 0.0
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for _ in answer.content:
            first = first or time.perf_counter() - began
    return first


async def _interactive(url: str, rate: float, seconds: float, tokens: int) -> list[float]:
    """Times to the first token of requests that come at random, `rate` a second on average."""
    draw = random.Random(7)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session, asyncio.TaskGroup() as group:
        tasks, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            tasks.append(group.create_task(_first_token(session, len(tasks), tokens)))
            await asyncio.sleep(draw.expovariate(rate))
    return sorted(task.result() for task in tasks)


def latency(args: argparse.Namespace) -> dict[str, Any]:
    step_us, token_us, slots = 40_000, 20, 32
    step_ms = (step_us + token_us * slots) / 1_000
    rate = 0.5 * slots / step_ms * 1_000 / args.tokens
    flags = ("--engine", "mock", "--mock-step-us", str(step_us), "--mock-token-us", str(token_us))
    flags += ("--worker-max-sequences", str(slots), "--router-local-prefill-tokens", "0")
    found: dict[str, Any] = {"requests_s": round(rate, 1), "step_ms": step_ms}
    with cluster(*flags) as run:
        for name in ("alone", "beside_a_job"):
            job = None
            if name != "alone":
                job = Job(run, [f"{n} words" for n in range(5_000)], args.tokens)
                while job.look()["request_counts"]["completed"] < slots:
                    time.sleep(0.2)
            times = asyncio.run(_interactive(run.gateway_url, rate, args.seconds, args.tokens))
            if job is not None:
                found["job_requests"] = job.look()["request_counts"]["completed"]
                job.cancel()
            found[name] = {
                "p50_ms": round(statistics.median(times) * 1e3, 1),
                "p99_ms": round(times[int(len(times) * 0.99)] * 1e3, 1),
                "requests": len(times),
            }
    allowed = max(1.25 * found["alone"]["p99_ms"], found["alone"]["p99_ms"] + step_ms)
    return {**found, "allowed_p99_ms": round(allowed, 1)}


def order(args: argparse.Namespace) -> dict[str, Any]:
    """Groups of requests with a long common beginning, mixed; their prefixes together exceed the cache."""
    draw = random.Random(5)
    prefixes = [f"{group:03d} " + "".join(draw.choices("abcdefgh ", k=600)) for group in range(80)]
    prompts = [f"{prefix} question {number}" for prefix in prefixes for number in range(12)]
    draw.shuffle(prompts)
    flags = ("--engine", "mock", "--mock-step-us", "2000", "--mock-token-us", "100", "--kv-memory-mb", "4")
    flags += ("--kvstore-ram-mb", "0", "--worker-max-batch-tokens", "512", "--worker-max-sequences", "8")
    found: dict[str, Any] = {"requests": len(prompts), "tokens_of_prefixes": sum(map(len, prefixes))}
    for name in ("arrival", "prefix"):
        with cluster(*flags, "--batch-order", name) as run:
            began = time.monotonic()
            job = Job(run, prompts, 4)
            for _ in job.progress():
                continue
            usage = job.look()["usage"]
            hits = usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"]
            found[name] = {"seconds": round(time.monotonic() - began, 1), "hits": round(hits, 3)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="baton bench batch", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all without")
    parser.add_argument("--engine", default="mock", help="for throughput: mock, or auto for a model")
    parser.add_argument("--requests", type=int, default=1_500, help="of the throughput job; default 1500")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer; default 64")
    parser.add_argument("--slots", type=int, default=64, help="of the worker, for throughput; default 64")
    parser.add_argument("--seconds", type=float, default=30.0, help="of interactive load; default 30")
    args = parser.parse_args()
    if wrong := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(wrong))}")
    for part in args.parts or PARTS:
        print(json.dumps({part: globals()[part](args)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
