"""`baton chaos` in short: real processes are hurt under load, and nothing is lost, wrong or left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from baton.cli.chaos.command import NAMES
from baton.cli.chaos.run import Options, run_scenario
from baton.cli.chaos.scenarios import SCENARIOS
from baton.config.settings import Settings


def settings() -> Settings:
    made = Settings()
    made.model.name, made.worker.engine = "mock", "mock"
    made.mock.step_us = 15_000
    made.worker.kv_memory_mb = 32
    made.worker.grace_ms = 5_000
    made.router.local_prefill_tokens = 0
    return made


async def test_each_kind_of_blow_in_turn() -> None:
    """Kills (-9) of every role, SIGSTOP, SIGTERM, nats-server gone for a second; two of each service."""
    options = Options(requests=48, at_once=6, tokens=160, longest=600, every_s=0.1)
    report = await run_scenario("each", settings(), options)
    assert report.clean, report.line()
    assert report.blows >= 8, report.line()
    assert report.slowest_s < 15.0, report.line()
    assert 0.0 < report.back_s < 15.0, report.line()  # one to two seconds where nothing else runs


async def test_clients_that_leave_and_full_decode_pools() -> None:
    options = Options(requests=24, at_once=6, tokens=48, longest=900)
    made = settings()
    SCENARIOS["full"].tweak(made)
    report = await run_scenario("cancel", made, options)
    assert report.clean, report.line()


def test_told_to_stop_it_leaves_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "baton.cli.main",
        "chaos",
        "--scenario",
        "full",
        "--requests",
        "5000",
    ]
    chaos = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60.0
    while len(list(tmp_path.glob("baton-chaos-*/shm/*.pool"))) < 3:
        assert chaos.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(chaos.pid).children(recursive=True)
    chaos.send_signal(signal.SIGTERM)
    assert chaos.wait(60.0) == 130
    assert not list(tmp_path.iterdir())
    assert not psutil.wait_procs(children, timeout=5.0)[1]


def test_every_scenario_has_a_name_and_words() -> None:
    assert set(NAMES) == set(SCENARIOS) - {"each"}
    assert all(scenario.words for scenario in SCENARIOS.values())
