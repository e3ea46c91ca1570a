"""`baton doctor`: is this machine fit, and what is to be mended. `--probe`: for health checks."""

from __future__ import annotations

import argparse
import sys

from baton.cli.flags import add_settings, load_settings
from baton.cli.local import add_run, find_cluster

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_COLOURS = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe",
        metavar="TARGET",
        help="only this: `alive` or `ready`, of the service on this machine that writes service.state_file; "
        "an http address that must answer; or the id of a service that must be ready",
    )
    add_run(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    if args.probe:
        return _probe(args)
    from baton.cli.checks import all_checks

    worst = 0
    for finding in all_checks(load_settings(args), args.pid):
        mark = _MARKS[finding.level]
        if sys.stdout.isatty():
            mark = f"{_COLOURS[finding.level]}{mark}\x1b[0m"
        print(f"{mark}  {finding.what}: {finding.found}", flush=True)
        if finding.fix:
            print(f"      {finding.fix}")
        worst = max(worst, int(finding.level == "fail"))
    return worst


def _probe(args: argparse.Namespace) -> int:
    """0 when the target works, 1 with a line on stderr when it does not. Bounded to a few seconds."""
    if args.probe in ("alive", "ready"):
        from baton.telemetry.state_file import probe

        wrong = probe(load_settings(args).service.state_file, args.probe)
        if wrong:
            print(f"error: {wrong}", file=sys.stderr)
        return int(bool(wrong))
    if args.probe.startswith(("http://", "https://")):
        from baton.cli.http import Api, ApiError

        url, _, path = args.probe.partition("://")[2].partition("/")
        scheme = args.probe.partition("://")[0]
        try:
            Api(f"{scheme}://{url}", timeout_s=3).check(f"/{path}" if path else "/ready")
        except ApiError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    import asyncio

    from baton.bus.connection import BusDown, BusRefused
    from baton.cli.status import heartbeats

    found = find_cluster(args)
    try:
        beats = asyncio.run(heartbeats(found.bus, until=args.probe, listen_s=3))
    except (BusDown, BusRefused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    states = {beat.id: str(beat.state) for beat in beats}
    if states.get(args.probe) == "ready":
        return 0
    print(f"error: {args.probe} is {states.get(args.probe, 'not there')}", file=sys.stderr)
    return 1
