"""What `baton up` shows: a table that fills on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One process as people see it."""

    id: str
    state: str  # starting, ready, restarting, ...
    note: str = ""
    pid: int = 0
    restarts: int = 0


class Display(Protocol):
    """Where news go. `rows` is called with all processes whenever one changes."""

    def say(self, text: str) -> None: ...
    def line(self, id: str, text: str) -> None: ...
    def rows(self, rows: list[Row]) -> None: ...
    def settle(self) -> None: ...


class PlainDisplay:
    """Lines on stdout, a service's own lines on stderr."""

    def __init__(self, *, prefix: bool = True) -> None:
        self._states: dict[str, str] = {}
        self._began = time.monotonic()
        self._prefix = prefix

    def say(self, text: str) -> None:
        print(text, flush=True)

    def line(self, id: str, text: str) -> None:
        print(self._prefixed(id, text), file=sys.stderr, flush=True)

    def rows(self, rows: list[Row]) -> None:
        for row in self._news(rows):
            if row.state == "ready":
                when = "again" if row.restarts else f"({time.monotonic() - self._began:.1f} s)"
                self.say(f"  {row.id} ready {when}")

    def settle(self) -> None:
        """Everything is up, or about to end: nothing is kept on the screen."""

    def _prefixed(self, id: str, text: str) -> str:
        return f"[{id}] {text}" if self._prefix else text

    def _news(self, rows: list[Row]) -> list[Row]:
        news = [row for row in rows if self._states.get(row.id) != row.state]
        self._states.update((row.id, row.state) for row in news)
        return news


class TableDisplay(PlainDisplay):
    """A live table until everything is ready; lines of the services run above it."""

    def __init__(self, *, prefix: bool = True) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(prefix=prefix)
        self._console = Console(highlight=False)
        self._live: Live | None = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self._shown: list[Row] = []

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def line(self, id: str, text: str) -> None:
        self._console.print(self._prefixed(id, text), markup=False, style="dim", soft_wrap=True)

    def rows(self, rows: list[Row]) -> None:
        if self._live is None:
            super().rows(rows)
        elif rows != self._shown:
            self._shown = rows
            self._news(rows)
            self._live.update(_table(rows), refresh=True)

    def settle(self) -> None:
        """The table stands as it is; from here on there are only lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None


_COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "restarting": "red",
    "draining": "yellow",
    "unhealthy": "red",
}


def _table(rows: list[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for name in ("service", "state", "pid", ""):
        table.add_column(name, no_wrap=name != "")
    for row in rows:
        note = row.note or (f"started again {row.restarts} times" if row.restarts else "")
        table.add_row(
            row.id,
            Text(row.state, style=_COLOURS.get(row.state, "")),
            str(row.pid or "-"),
            Text(note, style="dim"),
        )
    return table


def make_display(*, log_format: str) -> Display:
    """The table on a terminal that can do it, lines otherwise. JSON lines are passed on as they are."""
    import os

    terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    prefix = log_format != "json"
    return TableDisplay(prefix=prefix) if terminal else PlainDisplay(prefix=prefix)
