"""The hand-off, measured: `python benchmarks/handoff.py [--tokens 64,512,...] [--repeats N] [--runs N]`.

Copies blocks of SmolLM2-135M's size (16 tokens, 368,640 bytes) between two processes over shm and tcp, with
and without the checksum, beside the two ceilings: a plain memcpy and a raw loopback socket. Then it asks the
default model for the first token after a prompt of 2,000 tokens, handed over and read where it is decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
from handoff_first_token import first_tokens

from baton.kvcache import shm, tcp
from baton.kvcache.pool import KvPool, checksum
from baton.kvcache.transports import BlockServer, Puller, host_id
from baton.protocol.handoff import Address, BlockRef
from baton.protocol.liveness import Geometry

BLOCK = Geometry(block_size=16, block_bytes=368_640, layers=30, kv_heads=3, head_dim=64, dtype="float16")
EPOCH = 1
PROMPT = 2_000


def owner(directory: str, blocks: int, secret: str, pipe: Connection) -> None:
    """A worker process with a filled pool and a block server, until the pipe closes."""

    async def serve() -> None:
        pool = KvPool.create(directory, "bench", BLOCK, blocks, epoch=EPOCH)
        pool.data[:] = np.random.default_rng(0).integers(0, 256, pool.data.shape, dtype=np.uint8)
        server = BlockServer(pool, secret=secret, epoch=EPOCH)
        port = await server.start("127.0.0.1")
        sums = [checksum(pool.view(slot)) for slot in range(blocks)]
        pipe.send((pool.path, port, sums))
        await asyncio.to_thread(pipe.recv)
        await server.stop()
        pool.close()

    asyncio.run(serve())


def memcpy(nbytes: int, repeats: int) -> float:
    """Least seconds of one in-process copy."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    return _least(lambda: np.copyto(target, source), repeats)


def raw_socket(nbytes: int, repeats: int) -> float:
    """Least seconds to push bytes through a loopback TCP socket and receive them, one thread at each end."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    payload, into = memoryview(bytes(nbytes)), memoryview(bytearray(nbytes))

    def once() -> None:
        thread = threading.Thread(target=sender.sendall, args=(payload,))
        thread.start()
        got = 0
        while got < nbytes:
            got += receiver.recv_into(into[got:])
        thread.join()

    try:
        return _least(once, repeats)
    finally:
        for each in (listener, sender, receiver):
            each.close()


async def pulls(puller: Puller, address: Address, secret: str, refs: list[BlockRef], repeats: int) -> float:
    """Least seconds of one pull of all `refs`."""
    dest = list(range(len(refs)))
    await puller.pull(address, secret, EPOCH, refs, dest)
    return min([(await puller.pull(address, secret, EPOCH, refs, dest)).seconds for _ in range(repeats)])


def _least(once: Callable[[], object], repeats: int) -> float:
    """Of all, the one that others disturbed least."""
    once()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return min(times)


def _line(what: str, nbytes: int, seconds: float) -> None:
    print(f"  {what:24} {seconds * 1e3:9.3f} ms {nbytes / seconds / 1e9:7.2f} GB/s", flush=True)


async def measure(directory: str, tokens: list[int], repeats: int) -> None:
    blocks = max(tokens) // BLOCK.block_size
    secret = secrets.token_hex(16)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=owner, args=(directory, blocks, secret, theirs), daemon=True
    )
    process.start()
    path, port, sums = await asyncio.to_thread(ours.recv)
    pool = KvPool.create(directory, "bench-receiver", BLOCK, blocks, epoch=EPOCH + 1)
    puller = Puller(pool, shm_dir=directory)
    try:
        for count in tokens:
            refs = [BlockRef(slot, 0, sums[slot]) for slot in range(count // BLOCK.block_size)]
            nbytes = len(refs) * BLOCK.block_bytes
            print(f"{count} tokens, {len(refs)} blocks, {nbytes / 1e6:.1f} MB")
            _line("memcpy", nbytes, memcpy(nbytes, repeats))
            _line("raw loopback socket", nbytes, raw_socket(nbytes, repeats))
            for transport in ("shm", "tcp"):
                address = Address(
                    host=host_id(directory),
                    path=path,
                    tcp_host="127.0.0.1",
                    tcp_port=port,
                    transports=[transport],
                )
                _line(transport, nbytes, await pulls(puller, address, secret, refs, repeats))
                unchecked = [BlockRef(ref.slot, 0, 0) for ref in refs]
                with mock.patch.object(shm, "checksum", _no_sum), mock.patch.object(tcp, "checksum", _no_sum):
                    seconds = await pulls(puller, address, secret, unchecked, repeats)
                _line(f"{transport}, no checksum", nbytes, seconds)
    finally:
        puller.close()
        pool.close()
        ours.send(None)
        await asyncio.to_thread(process.join, 10)


async def measure_first_token(directory: str, runs: int) -> None:
    times = await first_tokens(Path(directory), PROMPT, runs)
    print(f"first token after {PROMPT} tokens, median of {runs}")
    for name, seconds in times.items():
        print(f"  {name:24} {seconds * 1e3:9.1f} ms", flush=True)
    there, here = times["handed over"], times["where it decodes"]
    print(f"  handing over adds {100 * (there / here - 1):.1f} %", flush=True)


def _no_sum(view: memoryview) -> int:
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="64,512,2048,8192")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--runs", type=int, default=5, help="first tokens of each kind; 0: none")
    parser.add_argument("--shm-dir", default="/dev/shm")
    parser.add_argument("--no-uvloop", action="store_true")
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    run = asyncio.run
    if not arguments.no_uvloop:
        import uvloop

        run = uvloop.run
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=arguments.shm_dir) as directory:
        run(measure(directory, tokens, arguments.repeats))
        if arguments.runs:
            run(measure_first_token(directory, arguments.runs))


if __name__ == "__main__":
    main()
