"""`baton status`: the live services of a cluster, as their heartbeats tell."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from baton.cli.flags import add_settings
from baton.cli.local import add_run, find_cluster

if TYPE_CHECKING:
    from baton.bus.directory import Directory
    from baton.config.settings import BusSettings
    from baton.protocol.liveness import Heartbeat

LISTEN_S = 2.5  # two heartbeats and a little; who asks is answered sooner
QUIET_S = 0.4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a service, one a line")
    add_run(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from baton.bus.connection import BusDown, BusRefused

    found = find_cluster(args)
    try:
        beats = asyncio.run(heartbeats(found.bus))
    except (BusDown, BusRefused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not beats:
        print("the bus is there, but no service is", file=sys.stderr)
        return 1
    if args.json:
        import msgspec

        for beat in beats:
            print(msgspec.json.encode(beat).decode())
    else:
        _print(beats)
    return 0


async def heartbeats(
    bus_settings: BusSettings, *, until: str = "", listen_s: float = LISTEN_S
) -> list[Heartbeat]:
    """Every service's newest heartbeat, by role and id, once no new ones turn up for a moment.

    With `until`, once that service is ready. After `listen_s` at the latest.
    """
    import asyncio

    from baton.bus.connection import Bus
    from baton.bus.directory import Directory

    bus = await Bus.connect(bus_settings, name="baton-status", wait_s=3)
    try:
        directory = Directory(bus, model=None)
        async with asyncio.TaskGroup() as group:
            follow = group.create_task(directory.run())
            if until:
                await directory.wait_for(lambda seen: _is_ready(seen, until), listen_s)
            else:
                await _until_quiet(directory, listen_s)
            follow.cancel()
        return everyone(directory)
    finally:
        await bus.close()


async def _until_quiet(directory: Directory, listen_s: float) -> None:
    deadline = time.monotonic() + listen_s
    count = 0
    while time.monotonic() < deadline:
        await directory.wait_for(lambda _: False, QUIET_S)
        if count and count == len(everyone(directory)):
            return
        count = len(everyone(directory))


def _is_ready(directory: Directory, id: str) -> bool:
    from baton.protocol.liveness import State

    beat = directory.get(id)
    return beat is not None and beat.state == State.READY


def everyone(directory: Directory) -> list[Heartbeat]:
    from baton.protocol.liveness import Role

    return [
        beat
        for role in Role
        for beat in sorted(directory.live(role, ready=False), key=lambda beat: (beat.id, beat.epoch))
    ]


def _print(beats: list[Heartbeat]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("role", "id", "state", "up for", "running", "waiting", "KV blocks", "pid", "where", "note"):
        right = name in ("running", "waiting", "KV blocks", "pid", "up for")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "note")
    for beat in beats:
        load = beat.load
        table.add_row(
            str(beat.role),
            beat.id,
            str(beat.state),
            _age(time.time() - beat.started_ms / 1_000) if beat.started_ms else "-",
            str(load.running) if load else "-",
            str(load.waiting) if load else "-",
            f"{load.blocks_used}/{load.blocks_total}" if load and load.blocks_total else "-",
            str(beat.pid or "-"),
            beat.url or beat.host,
            beat.note,
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
