"""The runner that the settings ask for."""

from __future__ import annotations

import os

from baton.config.settings import Settings
from baton.runner.base import Runner


def create(settings: Settings) -> Runner:
    """Loads the model. Only the engine asked for is imported: a mock worker never loads torch."""
    if settings.worker.engine == "mock":
        from baton.runner.mock import MockRunner

        return MockRunner(settings)
    # Read when torch loads OpenMP. Waiting threads must sleep: where workers share cores, spinning ones
    # keep the thread they wait for off its core (measured: a step of 0.6 s took 24).
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    from baton.runner.torch_runner import TorchRunner

    return TorchRunner(settings)
