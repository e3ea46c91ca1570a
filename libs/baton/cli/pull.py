"""`baton pull MODEL`: takes a model into the cache, with its progress shown."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.cli.flags import add_settings, load_settings

if TYPE_CHECKING:
    from baton.models.catalogue import ModelPath
    from baton.models.transfer import Progress, Report

_STAGES = {
    "wait": "waiting for another pull of it",
    "download": "downloading",
    "copy": "unpacking",
    "check": "checking",
}
STEP = 0.25  # of a stage, between two plain lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        help="catalogue name, hub ORG/NAME or a path; without it the model of the settings",
    )
    add_settings(parser, "[MODEL]")


def run(args: argparse.Namespace) -> int:
    from baton.models.errors import ModelError

    settings = load_settings(args)
    name = args.name or settings.model.name
    try:
        found = pull_shown(name, settings.model.cache_dir)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{name}: {found.path if found.kind != 'mock' else 'needs no file'}")
    return 0


def pull_shown(name: str, cache_dir: str) -> ModelPath:
    """Pulls a model, with a bar on a terminal and plain lines elsewhere.

    Raises:
        ModelError: no such model, or it cannot be fetched.
    """
    from baton.models.pull import pull

    with _bar(name) if sys.stderr.isatty() else _lines(name) as report:
        return pull(name, cache_dir, report)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)

        def report(progress: Progress) -> None:
            bars.update(
                task,
                description=f"{name}: {_STAGES[progress.stage]}",
                completed=progress.done,
                total=progress.total or None,
            )

        yield report


@contextlib.contextmanager
def _lines(name: str) -> Iterator[Report]:
    said: tuple[str, int] = ("", -1)

    def report(progress: Progress) -> None:
        nonlocal said
        part = int(progress.done / progress.total / STEP) if progress.total else 0
        if progress.stage == "check" or said == (progress.stage, part):
            return  # a check takes a moment, and happens each time
        said = progress.stage, part
        amount = f" {progress.done >> 20} of {progress.total >> 20} MB" if progress.total else ""
        print(f"{name}: {_STAGES[progress.stage]}{amount}", file=sys.stderr, flush=True)

    yield report
