"""How long a placement takes: many workers, a full index, a long prompt.

    python benchmarks/router.py [--workers 64] [--blocks 1000000] [--tokens 8192] [--decisions 3000]

Half of the workers prefill, half decode; each holds its share of the blocks, and a prompt's chain is held by
eight of them to different depths. One decision is `Placer.place` and, with `Place` and `Placement` as
bytes, everything the router does for it but the socket. CPU time is the thread's own: on a machine that
others use too it is what wall time would be on a quiet one.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from baton.placement.index import PrefixIndex
from baton.placement.placer import Placer
from baton.placement.view import ClusterView
from baton.protocol.base import pack_hashes
from baton.protocol.codec import Codec, encode
from baton.protocol.handoff import Address
from baton.protocol.liveness import Geometry, Heartbeat, Load, Role, State, WorkerInfo
from baton.protocol.placing import Place

BLOCK = 16
HELD_BY = 8


def cluster(workers: int, blocks: int) -> ClusterView:
    """Workers, half of each role, with some load each."""
    view = ClusterView()
    info = WorkerInfo(
        fingerprint="f",
        geometry=Geometry(block_size=BLOCK, block_bytes=1),
        num_blocks=2 * blocks // workers + 1_024,
        address=Address(host="h"),
        max_batch_tokens=8_192,
        max_sequences=256,
    )
    for number in range(workers):
        role = Role.PREFILL if number % 2 else Role.DECODE
        load = Load(running=number % 7, waiting_tokens=37 * number, blocks_used=number)
        view.heard(Heartbeat(role=role, id=f"w{number}", epoch=1, state=State.READY, worker=info, load=load))
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--decisions", type=int, default=3_000)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    index, view = PrefixIndex(), cluster(args.workers, args.blocks)
    chains = rng.integers(1, 2**63, (64, args.tokens // BLOCK), dtype=np.uint64)
    for chain in chains:
        for worker in rng.choice(args.workers, HELD_BY, replace=False):
            index.store((f"w{worker}", 1), chain[: rng.integers(1, len(chain) + 1)].tolist())
    began = time.perf_counter()
    for number in range(args.workers):
        fill = (args.blocks - len(index)) // (args.workers - number)
        index.store((f"w{number}", 1), rng.integers(1, 2**63, fill, dtype=np.uint64).tolist())
    print(f"{args.workers} workers, {len(index):,} blocks stored in {time.perf_counter() - began:.2f} s")
    placer = Placer(index, view, local_prefill_tokens=32)
    codec = Codec(Place)
    spent, walls, whole = list[float](), list[float](), list[float]()
    gc.freeze()
    for number in range(args.decisions):
        raw = encode(
            Place(
                request=f"{number:032x}",
                attempt=0,
                fingerprint="f",
                tokens=args.tokens,
                max_new_tokens=64,
                hashes=pack_hashes(chains[number % len(chains)]),
            )
        )
        first = time.thread_time()
        place = codec.decode(raw)
        began, wall = time.thread_time(), time.perf_counter()
        placement = placer.place(place, 0.0)
        walls.append(time.perf_counter() - wall)
        spent.append(time.thread_time() - began)
        assert placement is not None
        encode(placement)
        whole.append(time.thread_time() - first)
        view.placed((place.request, 0))
    for name, values in (("decision, CPU", spent), ("with messages, CPU", whole), ("decision, wall", walls)):
        p50, p99 = np.percentile(np.asarray(values) * 1e6, (50, 99))
        print(f"{name:<20} p50 {p50:6.1f} us   p99 {p99:6.1f} us")


if __name__ == "__main__":
    main()
