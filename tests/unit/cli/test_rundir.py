from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.cli.supervisor.rundir import RunDir, find_runs


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_run_is_found_while_it_lasts_and_only_its_user_can_read_it(own_place: Path) -> None:
    run = RunDir()
    run.info.nats_password = "hush"
    run.write()
    [found] = find_runs()
    assert (found.pid, found.nats_password) == (os.getpid(), "hush")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.path / "run.json").stat().st_mode) == 0o600
    run.remove()
    assert find_runs() == []
    assert list(own_place.iterdir()) == []


def test_what_a_killed_process_left_is_removed(own_place: Path) -> None:
    code = (
        "from baton.cli.supervisor.rundir import RunDir\n"
        "run = RunDir(); run.write(); print(run.path, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert [run.pid for run in find_runs()] == [process.pid]
        process.kill()
        process.wait()
    assert path.exists()
    assert find_runs() == []
    assert not path.exists()


def test_folders_that_are_not_runs_are_left_alone(own_place: Path) -> None:
    (own_place / "baton-notes").mkdir()
    (own_place / "baton-12").symlink_to(own_place / "baton-notes")
    (own_place / "baton-13").write_text("a file")
    fresh = own_place / "baton-14"  # just being made: it has no lock yet
    fresh.mkdir()
    old = own_place / "baton-15"
    old.mkdir()
    os.utime(old, (time.time() - 60,) * 2)
    assert find_runs() == []
    assert sorted(path.name for path in own_place.iterdir()) == [
        "baton-12",
        "baton-13",
        "baton-14",
        "baton-notes",
    ]


def test_a_damaged_file_is_no_run(own_place: Path) -> None:
    run = RunDir()
    (run.path / "run.json").write_text("{")
    assert find_runs() == []
    run.remove()
