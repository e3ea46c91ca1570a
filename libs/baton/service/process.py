"""The process around a service: signals, the supervising parent, and a last resort."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_ORPHANED = 3
EXIT_STUCK = 4

CHECK_S = 1.0
WATCHDOG_S = 20.0  # for an end, beyond the grace of the drain: well over what its bounded steps add up to


class ParentGone(Exception):
    """The supervisor has died; its processes end with it."""


class Parent:
    """The supervising process, if there is one: `BATON_SUPERVISED` holds its id, or 1 for whoever it is.

    The id closes the race with a supervisor that dies while this process is still starting.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        told = environ.get("BATON_SUPERVISED", "")
        self._pid = int(told) if told.isdecimal() and int(told) > 1 else os.getppid() if told else None

    def check(self) -> None:
        """Raises `ParentGone` once the supervisor is no longer the parent of this process."""
        if self._pid is not None and os.getppid() != self._pid:
            raise ParentGone(f"the supervisor (process {self._pid}) has gone")


class Signals:
    """SIGTERM and SIGINT: the first one sets `first`, a second one `second`.

    Installed before anything else, as the first process of a container has no default handlers.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._callback: Callable[[], None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)

    def on_first(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at the first signal; at once if it has come already."""
        self._callback = callback
        if self.first.is_set():
            callback()

    def _received(self, number: signal.Signals) -> None:
        if self.first.is_set():
            _log.warning("%s again: ending at once", number.name)
            self.second.set()
            return
        _log.info("%s: ending", number.name)
        self.first.set()
        if self._callback is not None:
            self._callback()


async def unless(
    event: asyncio.Event, work: Coroutine[Any, Any, T], check: Callable[[], None] | None = None
) -> asyncio.Task[T] | None:
    """Runs `work`; returns its finished task, or None when `event` came first (`work` is then cancelled).

    `check`, if given, is called each second, and raises to end the wait.
    """
    task = asyncio.create_task(work)
    signalled = asyncio.create_task(event.wait())
    try:
        while not (task.done() or signalled.done()):
            await asyncio.wait(
                {task, signalled},
                timeout=None if check is None else CHECK_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if check is not None:
                check()
        return task if task.done() else None
    finally:
        signalled.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def arm_watchdog(after_s: float) -> None:
    """Ends the process `after_s` from now, whatever still runs then: a thread that hangs, or the loop itself.

    Called once the process is on its way out; there is no way to call it off.
    """
    timer = threading.Timer(after_s, _give_up)
    timer.daemon = True
    timer.start()


def _give_up() -> None:
    _log.critical("did not end in time: giving up")
    sys.stderr.flush()
    os._exit(EXIT_STUCK)
