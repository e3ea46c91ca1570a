"""How a process tells a health check on its own machine that it lives, and whether it is ready.

A check that reads a file costs nothing to the bus, and a bus that is away does not look like a dead process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

FRESH_S = 10.0  # written every second; a loop that has not come round for this long hangs

Question = Literal["alive", "ready"]


def write_state(path: str, id: str, state: str) -> None:
    """One line, `ID: ready` or why it is not; replaced in one piece.

    Raises:
        OSError: it cannot be written.
    """
    passing = f"{path}.{os.getpid()}"
    Path(passing).write_text(f"{id}: {state}\n")
    os.replace(passing, path)


def probe(path: str, question: Question) -> str:
    """What is wrong with the process that writes `path`; empty: nothing.

    `alive`: it has written in the last seconds. `ready`: and it takes work.
    """
    if not path:
        return "service.state_file (BATON_SERVICE_STATE_FILE) is not set, here and in the service"
    try:
        age = time.time() - os.stat(path).st_mtime
        said = Path(path).read_text().strip()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if age > FRESH_S:
        return f"{said}, but that was {age:.0f} s ago"
    if question == "ready" and not said.endswith(": ready"):
        return said
    return ""
