"""`baton up`: checks this machine, then starts and supervises everything on it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from baton.cli.flags import add_settings, is_given, load_settings

if TYPE_CHECKING:
    from baton.config.settings import Settings


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 64:
        raise argparse.ArgumentTypeError("takes 0 to 64")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    workers = parser.add_argument_group("workers")
    workers.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill workers; default 1")
    workers.add_argument("--decode", type=_count, default=1, metavar="M", help="decode workers; default 1")
    jobs = parser.add_argument_group("batch jobs")
    jobs.add_argument("--batch", type=_count, default=1, metavar="N", help="batch services; default 1")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    from baton.cli.supervisor import plan, preflight
    from baton.models.errors import ModelError
    from baton.runner.native_choice import have_kernels

    settings = load_settings(args)
    if args.prefill + args.decode == 0:
        print("error: --prefill 0 --decode 0 leaves nobody to do the work", file=sys.stderr)
        return 2
    own_bus = not is_given(args, "bus.url")
    try:
        preflight.check_ports(settings)
        notes = plan.adapt(settings)
        notes += preflight.check_space(settings, args.prefill + args.decode)
        if settings.worker.engine != "mock":
            _have_model(settings)
            have_kernels(settings)
    except (preflight.NotPossible, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for note in (*notes, preflight.open_to_all(settings)):
        if note:
            print(note, file=sys.stderr)

    import asyncio

    from baton.bus.errors import BusDown, BusRefused
    from baton.cli.supervisor.cluster import Cluster
    from baton.cli.supervisor.display import make_display

    display = make_display(log_format=settings.telemetry.log_format)
    cluster = Cluster(
        settings,
        prefill=args.prefill,
        decode=args.decode,
        own_bus=own_bus,
        display=display,
        batch=args.batch,
    )
    try:
        return asyncio.run(cluster.run())
    except (BusDown, BusRefused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _have_model(settings: Settings) -> None:
    """Sees to it that the model is here; takes a missing one, since that is what was asked for.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    from baton.cli.pull import pull_shown
    from baton.models.catalogue import resolve
    from baton.models.errors import ModelNotFound

    try:
        resolve(settings.model.name, settings.model.cache_dir)
    except ModelNotFound:
        pull_shown(settings.model.name, settings.model.cache_dir)
