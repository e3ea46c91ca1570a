"""Supervision of one process, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from baton.cli.supervisor.child import MAX_LINE, Child, GaveUp, Spec, describe_exit


class Watched:
    """A child of our own making, and everything it was heard to say."""

    def __init__(self, code: str, **environ: str) -> None:
        spec = Spec("decode", "decode-0", (sys.executable, "-c", code), {**os.environ, **environ})
        self.news: list[str] = []
        self.lines: list[str] = []
        self.child = Child(
            spec, say=self.news.append, line=lambda _, text: self.lines.append(text), changed=lambda: None
        )

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
HEEDS = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


async def test_a_killed_process_is_started_again_and_said_so_once() -> None:
    watched = Watched(SLEEPER)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: watched.lines == ["up"])
    first = watched.child.pid
    watched.child.heartbeat(first)
    assert watched.child.ready
    os.kill(first, signal.SIGKILL)
    await watched.until(lambda: watched.lines == ["up", "up"])
    assert watched.child.pid not in (0, first)
    assert not watched.child.ready
    assert watched.news == ["decode-0 was ended by SIGKILL; starting it again at once"]
    assert watched.child.restarts == 1
    await watched.child.stop(5)
    await task


async def test_a_heartbeat_of_the_process_before_does_not_count() -> None:
    watched = Watched(SLEEPER)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: bool(watched.lines))
    watched.child.heartbeat(watched.child.pid + 1)
    assert not watched.child.ready
    await watched.child.stop(5)
    await task


async def test_a_process_that_heeds_sigterm_leaves_by_itself() -> None:
    watched = Watched(HEEDS)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: bool(watched.lines))
    assert await watched.child.stop(10) is True
    await asyncio.wait_for(task, 5)
    assert watched.child.pid == 0


async def test_one_that_does_not_is_killed_when_the_grace_is_over() -> None:
    watched = Watched(STUBBORN)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: bool(watched.lines))
    assert await watched.child.stop(0.2) is False
    await asyncio.wait_for(task, 5)
    assert watched.child.pid == 0


async def test_it_is_not_started_again_after_it_left_in_good_order() -> None:
    watched = Watched(HEEDS)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: bool(watched.lines))
    watched.child.heartbeat(watched.child.pid)
    os.kill(watched.child.pid, signal.SIGTERM)
    await asyncio.wait_for(task, 10)
    assert watched.child.left
    assert watched.lines == ["up"]


async def test_a_failing_start_is_given_up_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.supervisor.backoff.BASE_S", 0.01)
    watched = Watched("import sys; print('weights are damaged'); sys.exit(1)")
    with pytest.raises(GaveUp, match=r"decode-0 left with exit code 1(?s:.)*weights are damaged"):
        await asyncio.wait_for(watched.child.run(), 20)
    assert watched.child.restarts == 4
    assert watched.lines == ["weights are damaged"]  # the same failure is shown once


async def test_a_usage_error_is_given_up_at_once() -> None:
    watched = Watched("import sys; print('no such option'); sys.exit(2)")
    began = time.monotonic()
    with pytest.raises(GaveUp, match="no such option"):
        await watched.child.run()
    assert watched.child.restarts == 0
    assert time.monotonic() - began < 10


async def test_what_is_no_program_is_given_up() -> None:
    watched = Watched("")
    watched.child.spec = Spec("decode", "decode-0", ("/no/such/program",), {})
    with pytest.raises(GaveUp, match="cannot be started"):
        await watched.child.run()


async def test_stopping_during_a_pause_does_not_start_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.supervisor.backoff.BASE_S", 30.0)
    monkeypatch.setattr("baton.cli.supervisor.backoff.CAP_S", 30.0)
    watched = Watched("print('x')")
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: len(watched.news) == 2)  # the second pause is 30 s long
    await watched.child.stop(1)
    await asyncio.wait_for(task, 5)
    assert watched.child.restarts == 2


async def test_a_line_without_end_is_cut_and_bad_bytes_are_shown() -> None:
    code = f"import os; os.write(1, b'y' * {3 * MAX_LINE} + b'\\n\\xff ok\\n'); import time; time.sleep(60)"
    watched = Watched(code)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: bool(watched.lines) and watched.lines[-1].endswith("ok"))
    assert all(len(line) <= MAX_LINE for line in watched.lines)
    assert watched.lines[-1] == "\N{REPLACEMENT CHARACTER} ok"
    await watched.child.stop(1)
    await task


def test_exit_codes_in_words() -> None:
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(3) == "left with exit code 3"
