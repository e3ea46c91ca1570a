"""What `baton chaos` promises of its load and its report."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from baton.cli.chaos import run as chaos_run
from baton.cli.chaos.load import Load
from baton.cli.chaos.requests import Request, Undisturbed, make
from baton.cli.chaos.run import Report
from baton.cli.chaos.under_way import IN_FLIGHT, Run


@pytest.mark.parametrize("model", ["mock", "some-model"])
def test_prompts_of_50_to_1500_tokens_half_greedy_half_sampled_with_a_seed(model: str) -> None:
    requests = make(300, model=model, seed=1, tokens=64, longest=1_500)
    lengths = [len(prompt if model == "mock" else prompt.split()) for prompt in prompts(requests)]
    assert 50 <= min(lengths) < 60 and 1_300 < max(lengths) <= 1_500
    greedy = [request for request in requests if request.body["temperature"] == 0]
    sampled = [request for request in requests if request.body["temperature"] > 0]
    assert len(greedy) == len(sampled) == 150
    assert all("seed" in request.body for request in sampled)
    assert sum("presence_penalty" in request.body for request in sampled) == 75
    assert all(request.body["max_tokens"] == 64 and request.body["stream"] for request in requests)
    again = make(300, model=model, seed=1, tokens=64, longest=1_500)
    assert [request.body for request in again] == [request.body for request in requests]


def prompts(requests: list[Request]) -> list[Any]:
    return [request.body["prompt"] for request in requests]


def test_undisturbed_texts_last_from_one_command_to_the_next(tmp_path: Path) -> None:
    requests = make(4, model="some-model", seed=1, tokens=8, longest=60)
    undisturbed = Undisturbed.load(tmp_path / "texts")
    assert not undisturbed.fill(requests)
    for request in requests:
        request.text, request.ended, request.slowest_s = f"text {request.index}", True, 1.0
    undisturbed.keep(requests, 2.0)
    assert [(request.text, request.ended, request.slowest_s) for request in requests] == [
        ("", False, 0.0)
    ] * 4

    same = make(4, model="some-model", seed=1, tokens=8, longest=60)
    later = Undisturbed.load(tmp_path / "texts")
    assert later.fill(same) and later.capacity == 2.0
    assert [request.expected for request in same] == [f"text {index}" for index in range(4)]
    assert not later.fill(make(4, model="some-model", seed=2, tokens=8, longest=60))
    later.fingerprint = "of another build"
    assert not later.fill(same)
    (tmp_path / "texts").write_text("{")
    with pytest.raises(ValueError, match="remove it"):
        Undisturbed.load(tmp_path / "texts")


def test_folders_of_runs_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"baton-chaos-{gone.pid}-x", f"baton-chaos-{os.getpid()}-x", "baton-chaos-of-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").touch()
    with chaos_run._folder() as folder:
        assert folder.is_dir()
        assert {path.name for path in tmp_path.iterdir()} - {folder.name} == {
            f"baton-chaos-{os.getpid()}-x",
            "baton-chaos-of-mine",
        }
    assert not folder.exists()


def test_the_line_says_lost_wrong_leaked_and_slow() -> None:
    report = Report("kill", requests=300, blows=7, slow=1, slowest_s=5.5, back_s=1.26, seconds=30)
    assert report.line() == (
        "kill       300 requests, 7 blows: lost 0 wrong 0 leaked 0  slow 1, longest pause 5.50 s,"
        " ready again within 1.3 s  (30 s)"
    )
    assert report.clean
    for name in ("lost", "wrong", "leaked"):
        assert not Report("kill", **cast(Any, {name: 1})).clean


async def test_no_blow_falls_with_fewer_than_four_in_flight() -> None:
    load = Load(list, at_once=12)
    requests = make(10, model="mock", seed=1, tokens=8, longest=60)
    run = Run(cast(Any, None), load, requests, every_s=0.1)
    waiting = asyncio.create_task(run.some_moment())
    load.running |= {1, 2, 3}
    await asyncio.sleep(0.05)
    assert not waiting.done()
    load.running.add(4)
    assert await asyncio.wait_for(waiting, 5.0)
    assert run.flying == [IN_FLIGHT]
    load.running.clear()
    load.done = len(requests)
    assert not await run.some_moment()
