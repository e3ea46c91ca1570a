"""`baton drain SERVICE`: it takes nothing new, ends or moves what it has, and leaves."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from baton.cli.flags import add_settings
from baton.cli.local import add_run, find_cluster

if TYPE_CHECKING:
    from baton.config.settings import BusSettings

FIND_S = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", metavar="WORKER", help="its id, as `baton status` shows it: decode-0")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="longest drain, s; default 30")
    add_run(parser)
    add_settings(parser, "WORKER")


def run(args: argparse.Namespace) -> int:
    import asyncio

    from baton.bus.connection import BusDown, BusRefused, CallRejected, CallTimeout, NoResponder

    found = find_cluster(args)
    try:
        return asyncio.run(_drain(found.bus, args.service, max(0.0, args.grace)))
    except (BusDown, BusRefused) as error:
        print(f"error: {error}", file=sys.stderr)
    except (CallTimeout, NoResponder):
        print(
            f"error: {args.service} does not answer; `baton status` tells whether it lives", file=sys.stderr
        )
    except CallRejected as error:
        print(f"error: {args.service} refuses: {error.failure.message}", file=sys.stderr)
    return 1


async def _drain(bus_settings: BusSettings, id: str, grace_s: float) -> int:
    import asyncio

    from baton.bus.connection import Bus
    from baton.bus.directory import Directory
    from baton.protocol.codec import Codec
    from baton.protocol.request import Accepted, Rejected
    from baton.protocol.work import Drain

    bus = await Bus.connect(bus_settings, name="baton-drain", wait_s=3)
    try:
        directory = Directory(bus, model=None)
        async with asyncio.TaskGroup() as group:
            follow = group.create_task(directory.run())
            try:
                if not await directory.wait_for(lambda seen: seen.get(id) is not None, FIND_S):
                    print(f"error: there is no service {id}; `baton status` lists them", file=sys.stderr)
                    return 1
                beat = directory.get(id)
                assert beat is not None
                message = Drain(grace_ms=int(grace_s * 1_000))
                await bus.call(beat.subject, message, Codec(Accepted, Rejected), timeout_s=2.0)
                print(f"{id} drains: it takes nothing new and finishes what it has", flush=True)
                began = time.monotonic()

                def gone(seen: Directory) -> bool:
                    now = seen.get(id)
                    return now is None or now.epoch != beat.epoch

                if not await directory.wait_for(gone, grace_s + 5):
                    print(f"error: {id} is still there after {grace_s + 5:.0f} s", file=sys.stderr)
                    return 1
                print(f"{id} has left ({time.monotonic() - began:.1f} s)")
                return 0
            finally:
                follow.cancel()
    finally:
        await bus.close()
