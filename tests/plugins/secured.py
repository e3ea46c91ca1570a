"""A NATS server with one user a service, as `baton secrets` configures it, and services that log in to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from baton.bus.server import find_binary

BATON = [sys.executable, "-P", "-m", "baton.cli.main"]


def make_secrets(folder: Path, *flags: str) -> None:
    """Runs `baton secrets`."""
    done = subprocess.run(
        [*BATON, "secrets", str(folder), *flags], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class SecuredNats:
    """A running nats-server on a free port with `folder`/nats/nats.conf. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "nats.log"
        self._start("-1")

    def _start(self, port: str) -> None:
        command = [str(find_binary()), "--config", str(self.folder / "nats" / "nats.conf"), "--port", port]
        command += ["--http_port", "-1", "--ports_file_dir", str(self.folder), "--log", str(self._log)]
        self.process = subprocess.Popen([*command, "--addr", "127.0.0.1"], stdout=subprocess.DEVNULL)
        try:
            self.address = self._wait()
        except BaseException:
            self.process.kill()
            raise

    def restart(self) -> None:
        """Killed, and started again on the same port."""
        self.process.kill()
        self.process.wait(10)
        self._start(self.address.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"nats://{self.address}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def violations(self) -> list[str]:
        return [line for line in self.log.splitlines() if "Violation" in line]

    def _wait(self) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.process.poll() is None:
            for path in self.folder.glob(f"*_{self.process.pid}.ports"):
                try:
                    return str(json.loads(path.read_text())["nats"][0]).rpartition("/")[2]
                except ValueError:  # half written
                    continue
            time.sleep(0.02)
        raise AssertionError(f"nats-server does not start: {self.log if self._log.exists() else ''}")

    def __enter__(self) -> SecuredNats:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(10)


class Service:
    """One `baton serve`, as a container runs it: its credentials in a file, the rest in the environment."""

    def __init__(self, role: str, nats: SecuredNats, folder: Path, **environ: str) -> None:
        self.state = folder / f"{role}.state"
        self._log = folder / f"{role}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.environ = {
            **clean,
            "BATON_CONFIG": str(nats.folder / role.partition("-")[0] / "baton.toml"),
            "BATON_BUS_URL": nats.url,
            "BATON_SERVICE_STATE_FILE": str(self.state),
            **environ,
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*BATON, "serve", role.partition("-")[0]],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.state.exists() and self.state.read_text().endswith(": ready\n"):
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready:\n{self.log}")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(40)
