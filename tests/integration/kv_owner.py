"""A process that owns a KV pool and serves it over TCP; told over stdin what to do to it. Used by tests.

Slot `s` of generation `g` holds bytes of value `(s + g) % 251`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

from baton.kvcache.pool import KvPool
from baton.kvcache.transports import BlockServer
from baton.protocol.liveness import Geometry


def overwrite(pool: KvPool, slot: int) -> None:
    pool.generations[slot] += 1
    pool.data[slot] = (slot + int(pool.generations[slot])) % 251


def churn(pool: KvPool, slot: int, pause_s: float) -> None:
    while True:
        overwrite(pool, slot)
        time.sleep(pause_s)


async def main(directory: str, name: str, epoch: int, block_bytes: int, blocks: int, secret: str) -> None:
    geometry = Geometry(block_size=16, block_bytes=block_bytes)
    pool = KvPool.create(directory, name, geometry, blocks, epoch=epoch)
    for slot in range(blocks):
        pool.data[slot] = slot % 251
    server = BlockServer(pool, secret=secret, epoch=epoch)
    port = await server.start("127.0.0.1")
    print(json.dumps({"path": pool.path, "port": port}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, slot, *rest = line.split()
        if command == "overwrite":
            overwrite(pool, int(slot))
        elif command == "churn":
            threading.Thread(target=churn, args=(pool, int(slot), float(rest[0])), daemon=True).start()
        print("done", flush=True)
    await server.stop()
    pool.close()


if __name__ == "__main__":
    directory, name, epoch, block_bytes, blocks, secret = sys.argv[1:]
    asyncio.run(main(directory, name, int(epoch), int(block_bytes), int(blocks), secret))
