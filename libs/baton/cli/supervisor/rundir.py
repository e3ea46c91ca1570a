"""A run's folder: how `baton status`, `baton chat` and the like find what runs on this machine.

`$XDG_RUNTIME_DIR` (or the temporary folder) `/baton-<pid>/` holds `run.json` (mode 0600, since it carries
the bus credential) and `lock`, which the supervisor holds for as long as it lives: a folder whose lock is
free is left over and is removed by whoever finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

PREFIX = "baton-"


class RunInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What `run.json` holds."""

    pid: int
    started: float  # Unix seconds
    model: str = ""
    nats_url: str = ""
    nats_user: str = ""
    nats_password: str = ""
    gateway_url: str = ""  # empty until the whole way has been tried
    api_key: str = ""
    shm_dir: str = ""


def base_dirs() -> list[Path]:
    """Where run folders may lie; a new one goes into the first."""
    found: list[Path] = []
    for name in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if name and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK) and Path(name) not in found:
            found.append(Path(name))
    return found


class RunDir:
    """This process's own run folder."""

    def __init__(self) -> None:
        bases = base_dirs()
        if not bases:
            raise OSError("neither XDG_RUNTIME_DIR nor the temporary folder can be written to; set TMPDIR")
        self.path = bases[0] / f"{PREFIX}{os.getpid()}"
        if self.path.is_symlink() or self.path.exists():
            shutil.rmtree(self.path)  # a former process of our number; not ours to remove: this raises
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.info = RunInfo(pid=os.getpid(), started=time.time())

    def write(self) -> None:
        """Puts `info` on disk, whole or not at all."""
        new = self.path / "run.json.new"
        handle = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(self.info))
        new.replace(self.path / "run.json")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def read_run(path: Path) -> RunInfo | None:
    """What a run folder holds; None while there is nothing to read."""
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=RunInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def find_runs() -> list[RunInfo]:
    """Live runs of this user on this machine, newest first. Removes folders that dead ones left."""
    runs: list[RunInfo] = []
    for base in base_dirs():
        for path in base.glob(f"{PREFIX}*"):
            if not path.name.removeprefix(PREFIX).isdigit() or not _ours(path):
                continue
            if not _held(path):
                shutil.rmtree(path, ignore_errors=True)
                continue
            if (run := read_run(path)) is not None:
                runs.append(run)
    return sorted(runs, key=lambda run: run.started, reverse=True)


def _ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_uid == os.getuid() and not path.is_symlink() and path.is_dir()
    return False


def _held(path: Path) -> bool:
    """Is the folder's lock held? A folder so new that it has no lock yet counts as held."""
    try:
        handle = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return time.time() - path.stat().st_mtime < 10
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
