"""The set-up scripts, run for real in a folder of their own; programs that misbehave are put on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nonexistent", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder as a fresh clone has it, with a space in its name, as far as the set-up reads it."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "deploy" / "setup", folder / "deploy" / "setup")
    for name in ("pyproject.toml", "Makefile", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def program(folder: Path, name: str, text: str) -> None:
    """An executable shell script on the PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def bare_path(folder: Path) -> str:
    """A PATH with the few tools that the scripts use, and no Python."""
    folder.mkdir(exist_ok=True)
    for name in ("sh", "cat", "cksum", "df", "awk", "sed", "rm", "uname", "grep", "dirname", "env"):
        found = shutil.which(name)
        assert found is not None
        if not (folder / name).exists():
            (folder / name).symlink_to(found)
    return str(folder)


def setup(clone: Path, kind: str = "run", **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", **NO_INDEX, **environ}
    env = {name: value for name, value in env.items() if value}
    command = ["/bin/sh", "deploy/setup/setup.sh", kind]
    return subprocess.run(
        command,
        cwd=clone,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def fake_environment(clone: Path) -> Path:
    """An environment whose pip does nothing, but notes that it was called."""
    binaries = clone / ".venv" / "bin"
    binaries.mkdir(parents=True)
    notes = clone / "notes"
    program(binaries, "python", f'case "$*" in *"pip install"*) echo pip "$@" >>"{notes}";; esac')
    program(binaries, "baton", "exit 0")
    return notes


def test_the_second_time_does_nothing_and_a_change_does_it_again(clone: Path) -> None:
    notes = fake_environment(clone)
    first = setup(clone)
    assert first.returncode == 0, first.stderr
    said = notes.read_text()
    assert "-e ." in said
    again = setup(clone)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert notes.read_text() == said
    with (clone / "pyproject.toml").open("a") as file:
        file.write("\n# a dependency more\n")
    assert setup(clone).returncode == 0
    assert len(notes.read_text()) == 2 * len(said)


def test_what_the_tests_need_holds_what_a_run_needs_but_not_the_other_way(clone: Path) -> None:
    notes = fake_environment(clone)
    assert setup(clone, "test").returncode == 0
    said = notes.read_text()
    assert ".[test]" in said
    assert setup(clone, "run").returncode == 0
    assert notes.read_text() == said
    shutil.rmtree(clone / ".venv")
    notes.unlink()
    fake_environment(clone)
    assert setup(clone, "run").returncode == 0
    assert setup(clone, "test").returncode == 0
    assert ".[test]" in notes.read_text()


def test_a_moved_folder_is_set_up_again(clone: Path) -> None:
    fake_environment(clone)
    assert setup(clone).returncode == 0
    moved = clone.rename(clone.with_name("moved"))
    assert "Setting up" in setup(moved).stdout


def test_an_interrupted_set_up_is_not_taken_for_done(clone: Path) -> None:
    fake_environment(clone)
    python = (clone / ".venv" / "bin" / "python").read_text()
    program(clone / ".venv" / "bin", "python", 'case "$*" in *"pip install"*) exit 1;; esac')
    assert setup(clone).returncode == 1
    (clone / ".venv" / "bin" / "python").write_text(python)
    assert "Setting up" in setup(clone).stdout


def test_an_old_python_is_refused_with_the_fix(clone: Path, tmp_path: Path) -> None:
    shims = tmp_path / "shims"
    program(shims, "python3", 'case "$1" in --version) echo "Python 3.9.2";; *) exit 1;; esac')
    done = setup(clone, PATH=bare_path(shims))
    assert done.returncode == 1
    assert "python3 is Python 3.9.2; Baton needs Python 3.11 or newer" in done.stderr
    assert "apt install python3.11" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_newer_python_beside_an_old_one_is_found(clone: Path, tmp_path: Path) -> None:
    shims = tmp_path / "shims"
    program(shims, "python3", 'case "$1" in --version) echo "Python 3.9.2";; *) exit 1;; esac')
    program(shims, "python3.12", 'case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac')
    done = setup(clone, PATH=bare_path(shims))
    assert "python3.12 has no venv module" in done.stderr
    assert "apt install python3-venv" in done.stderr


def test_no_python_and_a_wrong_one_named(clone: Path, tmp_path: Path) -> None:
    done = setup(clone, PATH=bare_path(tmp_path / "shims"))
    assert done.returncode == 1
    assert "there is no python3 here" in done.stderr
    done = setup(clone, PYTHON="/no/such/python")
    assert "PYTHON=/no/such/python is not a program" in done.stderr


def test_a_full_disk_is_seen_before_anything_is_made(clone: Path, tmp_path: Path) -> None:
    shims = tmp_path / "shims"
    program(shims, "df", 'echo Filesystem; echo "/dev/x 9 8 300000 99% /"')
    done = setup(clone, PATH=f"{shims}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "300 MB free" in done.stderr
    assert "about 2 GB" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_real_environment_without_network_names_the_fix_and_a_local_torch_is_taken(
    clone: Path, tmp_path: Path
) -> None:
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:1/simple",
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "2",
        "PIP_NO_INDEX": "",
    }
    environ = {"PYTHON": sys.executable, "HOME": "", "TORCH_INDEX": "http://127.0.0.1:1/cpu", **nowhere}
    done = setup(clone, **environ)
    assert done.returncode == 1
    assert "http://127.0.0.1:1/cpu cannot be reached" in done.stdout
    assert "CUDA build of several GB" in done.stdout
    assert "the package index could not be reached" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr

    done = setup(clone, **environ, PIP_FIND_LINKS=str(wheel_of_torch(tmp_path / "wheels")))
    assert "Took torch==2.13.0 from a local wheel" in done.stdout
    assert done.returncode == 1  # there is no index for the rest

    done = setup(clone, **environ)
    assert "torch==" not in done.stdout.partition("Installing Baton")[0]  # it is there already


def wheel_of_torch(folder: Path) -> Path:
    """A folder as `PIP_FIND_LINKS` names one. What is in the wheel does not matter here."""
    folder.mkdir()
    info = "torch-2.13.0+cpu.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / "torch-2.13.0+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def test_make_names_its_targets(clone: Path) -> None:
    done = subprocess.run(["make"], cwd=clone, capture_output=True, text=True, timeout=30, check=True)
    for target in ("run", "test", "test-all", "lint", "clean"):
        assert f"make {target} " in done.stdout


def test_a_skipped_test_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "@pytest.mark.skip(reason='no redis here')\n"
        "def test_left_out(): pass\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "plugins")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no_skips", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["-p", "xdist.plugin", "-n", "2"]

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        paths = [*command, "--rootdir", ".", *names]
        return subprocess.run(
            paths, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    skipped = run("test_it.py")
    assert skipped.returncode == 1
    assert "no redis here" in skipped.stdout
    assert "1 passed, 1 skipped" in skipped.stdout
    assert run("test_it.py::test_good").returncode == 0
    assert run("test_it.py::test_good", "test_module.py").returncode == 1
    assert run("nothing_here.py").returncode == 5
