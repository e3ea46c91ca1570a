"""`baton chaos`: breaks a cluster of its own under load, and says what was lost, wrong, or left over."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cli.flags import add_settings, is_given, load_settings

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from baton.cli.chaos.requests import Undisturbed
    from baton.cli.chaos.run import Options, Report
    from baton.config.settings import Settings

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
    own.add_argument(
        "--load",
        type=float,
        metavar="SHARE",
        help="of what it can do undisturbed, which is measured first, asked for in bursts; 0: --at-once in "
        "flight all the time; default 0.5 with a model, 0 with the mock",
    )
    own.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of an answer; default 64")
    own.add_argument("--longest", type=int, default=1_500, metavar="N", help="longest prompt; default 1500")
    own.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between blows; default 5")
    own.add_argument("--seed", type=int, default=1, metavar="N")
    own.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="keeps the undisturbed texts for the next time; without it a model answers everything twice",
    )
    own.add_argument("--log", type=Path, metavar="FILE", help="append the services' lines")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    import logging

    from baton.cli.chaos.requests import Undisturbed
    from baton.cli.chaos.run import Options

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
    load = args.load if args.load is not None else 0.0 if settings.worker.engine == "mock" else 0.5
    options = Options(
        requests=args.requests,
        at_once=args.at_once,
        tokens=args.tokens,
        longest=args.longest,
        every_s=args.every,
        seed=args.seed,
        load=load,
        log=args.log,
    )
    try:
        undisturbed = Undisturbed.load(args.texts)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _run_all(names, settings, options, undisturbed)


def _run_all(names: list[str], settings: Settings, options: Options, undisturbed: Undisturbed) -> int:
    import asyncio

    from baton.cli.chaos.run import run_scenario
    from baton.cli.chaos.stage import StageError

    clean = True
    for name in names:
        try:
            report = asyncio.run(_until_told(run_scenario(name, settings, options, undisturbed)))
        except StageError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
        except asyncio.CancelledError:
            return 130
        print(report.line(), flush=True)
        clean = clean and report.clean
    return 0 if clean else 1


async def _until_told(work: Coroutine[Any, Any, Report]) -> Report:
    """SIGTERM takes the cluster down in order, as Ctrl-C does."""
    import asyncio
    import signal

    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
