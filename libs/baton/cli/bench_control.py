"""`baton bench control`: what gateway, tokenizer, router and bus cost, measured with the mock engine.

Starts a cluster of its own on free ports and takes it down again. The time to first token is taken by a plain
socket in this process, one request at a time, and the mock's own step cost, which is known, is taken off it.
CPU time is what the kernel has booked for each process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from baton.cli.bench_cluster import cluster
from baton.config.settings import Settings

if TYPE_CHECKING:
    import aiohttp

    from baton.cli.supervisor.rundir import RunInfo

CONTROL = ("gateway", "tokenizer", "router")
TOGETHER, ALL = "gateway, tokenizer and router", "all processes"
TEXT = "the quick brown fox jumps over a lazy dog while seven wise old owls watch from tall green trees and "


@dataclass(frozen=True, slots=True)
class Use:
    """CPU seconds and resident memory of one process."""

    cpu_s: float
    rss: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="baton bench control", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--requests", type=int, default=200, help="requests one at a time; default 200")
    parser.add_argument("--clients", type=int, default=32, help="clients at once for CPU a token; default 32")
    parser.add_argument("--rounds", type=int, default=8, help="requests of each client; default 8")
    parser.add_argument("--words", type=int, default=100, help="words of each prompt; default 100")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer; default 64")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of rest to watch; default 10")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(argv)
    workers = ("--prefill", str(args.prefill), "--decode", str(args.decode))
    try:
        with cluster("--engine", "mock", "--kv-memory-mb", "128", *workers) as run:
            figures = asyncio.run(_measure(args, run))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(figures))
    else:
        _print(figures, args)
    return 0


async def _measure(args: argparse.Namespace, run: RunInfo) -> dict[str, Any]:
    import aiohttp

    from baton.cli.status import heartbeats
    from baton.config.settings import BusSettings

    bus = BusSettings(url=run.nats_url, user=run.nats_user, password=run.nats_password)
    pids = {beat.id: beat.pid for beat in await heartbeats(bus)} | _around(run.pid)
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(run.gateway_url, timeout=timeout, connector=connector) as session:
        for _ in range(10):
            await _ask(session, 32, 2)
        figures: dict[str, Any] = {
            "added_ms": {
                "prefilled by the decode worker, 32 tokens": _added(run.gateway_url, 32, args.requests),
                "handed over by the prefill worker, 200 tokens": _added(run.gateway_url, 200, args.requests),
            }
        }
        before, began = _use(pids), time.monotonic()
        await asyncio.sleep(args.idle)
        after, rested = _use(pids), time.monotonic() - began
        figures["idle_cpu_percent"] = {
            id: 100 * (after[id].cpu_s - before[id].cpu_s) / rested for id in after if id in before
        }
        figures["rss_mb"] = {id: use.rss / 2**20 for id, use in after.items()}
        figures |= await _under_load(session, pids, args)
    return figures


async def _under_load(
    session: aiohttp.ClientSession, pids: dict[str, int], args: argparse.Namespace
) -> dict[str, Any]:
    """Each client sends its next request when the answer to the last one is complete."""
    length = len(TEXT) * args.words // TEXT.count(" ")

    async def client() -> int:
        return sum([await _ask(session, length, args.tokens) for _ in range(args.rounds)])

    await asyncio.gather(*(_ask(session, length, 2) for _ in range(args.clients)))
    before, began = _use(pids), time.monotonic()
    tokens = sum(await asyncio.gather(*(client() for _ in range(args.clients))))
    took, after = time.monotonic() - began, _use(pids)
    spent = {id: after[id].cpu_s - before[id].cpu_s for id in after if id in before}
    control = sum(seconds for id, seconds in spent.items() if id.rpartition("-")[0] in CONTROL)
    return {
        "requests": args.clients * args.rounds,
        "tokens": tokens,
        "tokens_per_s": tokens / took,
        "cpu_s": spent | {TOGETHER: control, ALL: sum(spent.values())},
    }


def _added(url: str, prompt_tokens: int, requests: int) -> dict[str, float]:
    """Time to first token less the mock's step cost, ms, one request at a time; each prompt is new.

    Over one plain socket: an HTTP library in the client would take as long as the services do.
    """
    settings = Settings()
    steps = math.ceil(prompt_tokens / settings.worker.max_batch_tokens)
    cost_s = (steps * settings.mock.step_us + prompt_tokens * settings.mock.token_us) / 1e6
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        added = sorted(_first_text_s(connection, prompt_tokens) - cost_s for _ in range(requests))
    p99 = added[min(len(added) - 1, int(len(added) * 0.99))]
    return {"p50": 1e3 * statistics.median(added), "p99": 1e3 * p99}


def _first_text_s(connection: socket.socket, prompt_tokens: int) -> float:
    body = json.dumps(_body(prompt_tokens, 2)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: baton\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    began, first, seen = time.perf_counter(), 0.0, b""
    connection.sendall(request)
    while not seen.endswith(b"\r\n0\r\n\r\n"):
        data = connection.recv(65_536)
        seen += data
        if not first and b"\ndata: {" in seen:
            first = time.perf_counter() - began
        if not data or not seen.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway answered {seen[:500].decode(errors='replace')!r}")
    return first


async def _ask(session: aiohttp.ClientSession, prompt_tokens: int, tokens: int) -> int:
    """One streamed completion; returns how many tokens it had."""
    counted = 0
    async with session.post("/v1/completions", json=_body(prompt_tokens, tokens)) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {") and (b'"usage":{' in line or b'"usage": {' in line):
                counted = json.loads(line[6:])["usage"]["completion_tokens"]
    if counted != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {counted}")
    return counted


def _body(prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """A new prompt of `prompt_tokens` bytes, which are the mock's tokens."""
    prompt = f"{time.perf_counter_ns():x} {TEXT * (1 + prompt_tokens // len(TEXT))}"[:prompt_tokens]
    body = {"model": "mock", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return body | {"stream_options": {"include_usage": True}}


def _around(supervisor: int) -> dict[str, int]:
    """The processes that are no services: the supervisor and its nats-server."""
    import psutil

    children = psutil.Process(supervisor).children()
    servers = [("nats-server", child.pid) for child in children if child.name() == "nats-server"]
    return dict([("supervisor", supervisor), *servers])


def _use(pids: dict[str, int]) -> dict[str, Use]:
    import psutil

    found = {}
    for id, pid in pids.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[id] = Use(times.user + times.system, process.memory_info().rss)
    return found


def _print(figures: dict[str, Any], args: argparse.Namespace) -> None:
    print("Added to the first token, one request at a time (over a plain socket, less the mock's step cost)")
    for name, value in figures["added_ms"].items():
        print(f"  {name:<48} p50 {value['p50']:7.2f} ms   p99 {value['p99']:7.2f} ms")
    clients, rate = f"{args.clients} clients, {args.words} words", figures["tokens_per_s"]
    print(f"\nCPU with {clients} in, {args.tokens} tokens out ({rate:.0f} tokens a second)")
    for name, seconds in figures["cpu_s"].items():
        token, request = 1e6 * seconds / figures["tokens"], 1e3 * seconds / figures["requests"]
        print(f"  {name:<48} {token:8.1f} us a token {request:8.2f} ms a request")
    print(f"\nAt rest ({args.idle:g} s)                                      CPU of a core        memory")
    for id, percent in figures["idle_cpu_percent"].items():
        print(f"  {id:<48} {percent:10.2f} %   {figures['rss_mb'][id]:8.0f} MB")
    total = sum(figures["idle_cpu_percent"].values())
    print(f"  {'together':<48} {total:10.2f} %   {sum(figures['rss_mb'].values()):8.0f} MB")
