"""Waiting for work or an event, and the supervising parent."""

from __future__ import annotations

import asyncio
import os

import pytest

from baton.protocol.liveness import Role
from baton.protocol.subjects import check_instance
from baton.service.base import default_instance
from baton.service.process import Parent, ParentGone, unless


async def test_unless_returns_the_finished_work() -> None:
    async def work() -> int:
        return 7

    done = await unless(asyncio.Event(), work())
    assert done is not None and done.result() == 7


async def test_unless_hands_on_a_failure() -> None:
    async def work() -> None:
        raise KeyError("x")

    done = await unless(asyncio.Event(), work())
    assert done is not None
    with pytest.raises(KeyError):
        done.result()


async def test_unless_ends_the_work_when_the_event_comes_first() -> None:
    event, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            event.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    assert await unless(event, work()) is None
    assert cleaned.is_set()


async def test_unless_ends_the_work_when_it_is_itself_cancelled_or_checked_out() -> None:
    cleaned = 0

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            cleaned += 1

    def check() -> None:
        raise ParentGone("gone")

    waiting = asyncio.create_task(unless(asyncio.Event(), work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ParentGone):
        await unless(asyncio.Event(), work(), check)
    assert cleaned == 2


@pytest.mark.parametrize("told", ["", "1", str(os.getppid())])
def test_a_parent_that_lives_is_fine(told: str) -> None:
    Parent({"BATON_SUPERVISED": told} if told else {}).check()


def test_a_parent_that_was_gone_before_we_looked_is_noticed() -> None:
    with pytest.raises(ParentGone, match=f"process {os.getpid()}"):
        Parent({"BATON_SUPERVISED": str(os.getpid())}).check()


def test_a_default_instance_may_stand_in_a_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host", "a.b.example", "ünï code" * 20, ""):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert check_instance(default_instance(Role.PREFILL)).startswith("prefill-")
