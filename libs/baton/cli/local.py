"""Finding the cluster that a command is about: named by settings, or running on this machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cli.flags import is_given, load_settings

if TYPE_CHECKING:
    from baton.cli.supervisor.rundir import RunInfo
    from baton.config.settings import BusSettings


@dataclass(frozen=True)
class Found:
    """A cluster's bus, and the API's address and key as far as they are known."""

    bus: BusSettings
    gateway_url: str = ""
    api_key: str = ""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds `--pid`: which of several local clusters."""
    parser.add_argument(
        "--pid", type=int, help="process id of the `baton up` that is meant, if there are several"
    )


def local_run(pid: int | None) -> RunInfo | None:
    """The run with this process id; without one, the newest."""
    from baton.cli.supervisor.rundir import find_runs

    runs = [run for run in find_runs() if pid in (None, run.pid)]
    if len(runs) > 1:
        others = ", ".join(str(run.pid) for run in runs[1:])
        print(
            f"several clusters run here; this is {runs[0].pid} (--pid for others: {others})", file=sys.stderr
        )
    return runs[0] if runs else None


def find_cluster(args: argparse.Namespace) -> Found:
    """The cluster of `--nats` (flag, environment, file), else the one that runs on this machine.

    Raises:
        SystemExit: there is none (code 1, said on stderr).
    """
    settings = load_settings(args)
    if is_given(args, "bus.url"):
        return Found(settings.bus, api_key=settings.gateway.api_key)
    run = local_run(args.pid)
    if run is None:
        which = f"with process id {args.pid} " if args.pid else ""
        print(
            f"error: no cluster {which}runs on this machine. Start one: baton up. "
            "One elsewhere: --nats URL, with BATON_BUS_USER and BATON_BUS_PASSWORD.",
            file=sys.stderr,
        )
        raise SystemExit(1)
    bus = type(settings.bus)(url=run.nats_url, user=run.nats_user, password=run.nats_password)
    return Found(bus, run.gateway_url, settings.gateway.api_key or run.api_key)
