"""A whole Baton for tests: `baton up` in a process of its own, in a folder of its own, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from baton.cli.supervisor.rundir import RunInfo, read_run
from baton.config.settings import BusSettings

BATON = [sys.executable, "-P", "-m", "baton.cli.main"]
START_S = 90.0


class Running:
    """One running `baton up`; a context manager. `url` is the gateway's, `log` what it printed."""

    def __init__(self, folder: Path, *flags: str, environ: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.shm = folder / "shm"
        self.shm.mkdir(parents=True)
        self._log_path = folder / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        command = [
            *BATON,
            "up",
            "--port",
            "0",
            "--metrics-port",
            "0",
            "--worker-shm-dir",
            str(self.shm),
            *flags,
        ]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**clean, "XDG_RUNTIME_DIR": str(folder), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.run = self._wait_ready()
        except BaseException:
            self.process.kill()
            raise

    @property
    def url(self) -> str:
        return self.run.gateway_url

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def bus(self) -> BusSettings:
        return BusSettings(url=self.run.nats_url, user=self.run.nats_user, password=self.run.nats_password)

    def _wait_ready(self) -> RunInfo:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for path in self.folder.glob("baton-*"):
                info = read_run(path)
                if info is not None and info.gateway_url:
                    return info
            time.sleep(0.05)
        raise AssertionError(f"not ready in {START_S:g} s:\n{self.log}")

    def post(self, path: str, body: Any, *, timeout: float = 60.0) -> tuple[int, Any]:
        """(status, decoded body); `body` is JSON-encoded unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        return _send(request, timeout)

    def get(self, path: str, *, timeout: float = 10.0) -> tuple[int, Any]:
        return _send(urllib.request.Request(self.url + path), timeout)

    def metrics(self) -> dict[str, float]:
        """Every sample of the cluster's /metrics by its name and labels, as text."""
        _, text = self.get("/metrics")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.split("{")[0] == name and all(label in sample for label in wanted)
        )

    def settled(self, name: str, **labels: str) -> float:
        """As `total`, once every figure that is on its way has come in (services send theirs every 2 s)."""
        time.sleep(2.5)
        return self.total(name, **labels)

    def stop(self, timeout: float = 40.0) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _send(request: urllib.request.Request, timeout: float) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, _decode(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, _decode(error.read())


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()
