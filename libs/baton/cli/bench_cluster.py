"""A whole Baton for a benchmark: on free ports, in a folder of its own, gone at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from baton.cli.supervisor.rundir import RunInfo, read_run

START_S = 90.0


@contextlib.contextmanager
def cluster(*flags: str) -> Iterator[RunInfo]:
    """`baton up` with these flags, and no setting from the environment.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        command = [sys.executable, "-P", "-m", "baton.cli.main", "up", "--port", "0"]
        command += ["--metrics-port", "0", "--log-level", "warning", *flags]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**environ, "XDG_RUNTIME_DIR": folder}
            )
        try:
            deadline = time.monotonic() + START_S
            run: RunInfo | None = None
            while run is None or not run.gateway_url:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the cluster did not start:\n{log.read_text(errors='replace')[-2_000:]}"
                    )
                time.sleep(0.05)
                run = read_run(Path(folder, f"baton-{process.pid}"))
            yield run
        finally:
            process.terminate()
            process.wait()
