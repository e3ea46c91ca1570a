"""`baton bench control | engine | handoff | batch`: finds the measurement and runs it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import baton

# In the source tree, not in the installed package: they bring what only a measurement needs.
SCRIPTS = {"engine": "engine.py", "handoff": "handoff.py", "batch": "batch.py"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which",
        choices=("control", *SCRIPTS),
        help="control: what the services add to a token, on the mock engine; engine: speed of prefill and "
        "decode; handoff: moving KV blocks between processes; batch: jobs, alone and beside interactive "
        "requests",
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options; try --help")


def run(args: argparse.Namespace) -> int:
    if args.which == "control":
        from baton.cli import bench_control

        return bench_control.main(args.rest)
    script = Path(baton.__file__).resolve().parents[2] / "benchmarks" / SCRIPTS[args.which]
    if not script.is_file():
        print(
            f"error: {script} is not there; `baton bench {args.which}` needs a source checkout of Baton "
            "(pip install -e . in it, or make run)",
            file=sys.stderr,
        )
        return 1
    return subprocess.run([sys.executable, str(script), *args.rest], check=False).returncode
