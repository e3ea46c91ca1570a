"""`baton doctor --probe alive` and `ready`: health checks that read a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.telemetry.state_file import FRESH_S, write_state


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "state"
    monkeypatch.setenv("BATON_SERVICE_STATE_FILE", str(made))
    return made


@pytest.mark.parametrize(
    ("state", "alive", "ready"),
    [("ready", 0, 0), ("starting", 0, 1), ("draining", 0, 1), ("the message bus is away", 0, 1)],
)
def test_a_service_that_lives(path: Path, state: str, alive: int, ready: int) -> None:
    write_state(str(path), "router-1", state)
    assert main(["doctor", "--probe", "alive"]) == alive
    assert main(["doctor", "--probe", "ready"]) == ready


def test_one_that_hangs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_state(str(path), "router-1", "ready")
    before = time.time() - FRESH_S - 5
    os.utime(path, (before, before))
    for question in ("alive", "ready"):
        assert main(["doctor", "--probe", question]) == 1
        assert "router-1: ready, but that was 15 s ago" in capsys.readouterr().err


def test_one_that_is_not_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--probe", "alive"]) == 1
    assert "No such file" in capsys.readouterr().err
    monkeypatch.delenv("BATON_SERVICE_STATE_FILE")
    assert main(["doctor", "--probe", "alive"]) == 1
    assert "BATON_SERVICE_STATE_FILE" in capsys.readouterr().err
