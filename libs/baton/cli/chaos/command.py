"""`baton chaos`: breaks a cluster of its own under load, and says what was lost, wrong, or left over."""

from __future__ import annotations

import argparse
import sys

from baton.cli.flags import add_settings, is_given, load_settings

NAMES = (
    *("none", "kill", "stop", "tokenizer", "router", "cut"),
    *("full", "cancel", "overload", "bus1", "bus10", "rolling"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("chaos")
    own.add_argument(
        "--scenario", default="all", metavar="NAMES", help=f"of {', '.join(NAMES)}, with commas; default all"
    )
    own.add_argument("--requests", type=int, default=300, metavar="N", help="of each scenario; default 300")
    own.add_argument("--at-once", type=int, default=12, metavar="N", help="requests in flight; default 12")
    own.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of an answer; default 64")
    own.add_argument("--longest", type=int, default=1_500, metavar="N", help="longest prompt; default 1500")
    own.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between blows; default 5")
    own.add_argument("--seed", type=int, default=1, metavar="N")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio
    import logging

    from baton.cli.chaos.run import Options, run_scenario
    from baton.cli.chaos.stage import StageError

    names = list(NAMES) if args.scenario == "all" else args.scenario.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        print(f"error: no scenario {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    settings = load_settings(args)
    logging.getLogger("baton").setLevel(logging.CRITICAL)  # a bus that goes away is no news here
    if not is_given(args, "worker.engine"):
        settings.worker.engine = "mock"
    if settings.worker.engine == "mock":
        settings.model.name = "mock"
        settings.mock.step_us = settings.mock.step_us if is_given(args, "mock.step_us") else 10_000
    if not is_given(args, "router.local_prefill_tokens"):
        settings.router.local_prefill_tokens = 0  # everything is handed over
    if not is_given(args, "worker.grace_ms"):
        settings.worker.grace_ms = 8_000
    options = Options(
        requests=args.requests,
        at_once=args.at_once,
        tokens=args.tokens,
        longest=args.longest,
        every_s=args.every,
        seed=args.seed,
    )
    clean = True
    for name in names:
        try:
            report = asyncio.run(run_scenario(name, settings, options))
        except StageError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
        print(report.line(), flush=True)
        clean = clean and report.clean
    return 0 if clean else 1
