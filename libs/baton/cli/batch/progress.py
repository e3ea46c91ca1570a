"""A batch's progress in the terminal: a bar with rate, time left and failures."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 10  # percent; where there is no terminal


class Bar:
    """On standard error, so that results can go to standard output. Lines instead where it is no terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[failed]}"),
            console=Console(stderr=True),
        )
        self._live = sys.stderr.isatty()
        self._task = self._progress.add_task("", total=None, rate="", failed="")
        self._said: tuple[str, int] = ("", -1)

    def __enter__(self) -> Bar:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def show(self, batch: dict[str, Any]) -> None:
        counts = batch["request_counts"]
        done, total = counts["completed"] + counts["failed"], counts["total"]
        if not self._live:
            self._line(batch["status"], done, total, counts["failed"])
            return
        speed = self._progress.tasks[0].speed
        self._progress.update(
            self._task,
            description=batch["status"],
            completed=done,
            total=total or None,
            rate=f"{speed:,.1f}/s" if speed else "",
            failed=f"{counts['failed']} failed" if counts["failed"] else "",
        )

    def _line(self, status: str, done: int, total: int, failed: int) -> None:
        step = 100 * done // total // LINE_EVERY if total else 0
        if (status, step) != self._said:
            self._said = status, step
            wrong = f", {failed} failed" if failed else ""
            print(f"{status} {done}/{total}{wrong}", file=sys.stderr)
