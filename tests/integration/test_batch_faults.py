"""A long job while all that it needs is killed in turn: each request has one result, the same as ever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from batch_jobs import begin, jsonl, line, look, results, texts, wait
from running import Running

KILLS = ("batch-0", "router-0", "prefill-0", "nats", "decode-0")


def _pid(baton: Running, name: str) -> int:
    """The process of a service; of the NATS server for `nats`. 0 while it is away."""
    for child in psutil.Process(baton.process.pid).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.Error:
            continue
        if name in command or (name == "nats" and command and "nats-server" in command[0]):
            return child.pid
    return 0


def _job(count: int, **more: object) -> bytes:
    return jsonl(line(f"request-{i}", f"question {i % 7} " * 8 + str(i), **more) for i in range(count))


def _disturbed(baton: Running, content: bytes, every_s: float, limit_s: float) -> tuple[dict[str, str], int]:
    """Runs a job while one process after the other is killed; its texts and how many kills there were."""
    id, kills, at = begin(baton, content), 0, time.monotonic() + every_s / 2
    until = time.monotonic() + limit_s
    while look(baton, id)["status"] not in ("completed", "failed"):
        assert time.monotonic() < until, (look(baton, id), baton.log[-3_000:])
        if time.monotonic() >= at:
            victim = _pid(baton, KILLS[kills % len(KILLS)])
            if victim:
                os.kill(victim, signal.SIGKILL)
                kills += 1
            at = time.monotonic() + every_s
        time.sleep(0.2)
    batch = wait(baton, id)
    assert batch["status"] == "completed", batch
    assert batch["error_file_id"] is None, results(baton, batch["error_file_id"])[:3]
    return texts(results(baton, batch["output_file_id"])), kills


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_5000_requests_survive_kills_of_everything_in_turn(tmp_path: Path) -> None:
    # A step of 20 ms, so that the job lasts through a dozen kills.
    flags = ("--engine", "mock", "--mock-step-us", "20000", "--prefill", "1", "--decode", "1")
    content = _job(5_000, max_tokens=48)
    with Running(tmp_path / "quiet", "--engine", "mock") as baton:
        batch = wait(baton, begin(baton, content), 200)
        expected = texts(results(baton, batch["output_file_id"]))
    assert len(expected) == 5_000
    with Running(tmp_path / "killed", *flags) as baton:
        got, kills = _disturbed(baton, content, 5.0, 300)
    print(f"{kills} kills, {len(got)} results")
    assert kills >= 8
    assert got == expected
