"""The runner that the settings ask for."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.settings import Settings
from baton.runner.base import Runner
from baton.runner.constrained import ConstrainedRunner

if TYPE_CHECKING:
    from baton.text.grammar.states import GrammarStates

log = logging.getLogger(__name__)


def create(settings: Settings) -> ConstrainedRunner:
    """Loads the model. Only the engine asked for is imported: a mock worker never loads torch."""
    return ConstrainedRunner(_create(settings), lambda: _open_states(settings))


def _open_states(settings: Settings) -> GrammarStates:
    from baton.text.grammar.open import open_states

    return open_states(settings.model.name, settings.model.cache_dir)


def _create(settings: Settings) -> Runner:
    if settings.worker.engine == "mock":
        from baton.runner.mock import MockRunner

        return MockRunner(settings)
    if settings.worker.engine in ("auto", "triton"):
        triton = _create_triton(settings)
        if triton is not None:
            return triton
    if settings.worker.engine in ("auto", "native"):
        native = _create_native(settings)
        if native is not None:
            return native
    # Read when torch loads OpenMP: waiting threads spin about 20 us, then sleep. Where workers share cores,
    # longer spinning keeps the thread that is waited for off its core (measured: 24 s for a step of 0.6 s).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from baton.runner.torch_runner import TorchRunner

    return TorchRunner(settings)


def _create_triton(settings: Settings) -> Runner | None:
    """The GPU's runner; None where `auto` finds none, or none that can be used, which is told in one line."""
    from baton.models.errors import UnsupportedModel
    from baton.runner.triton_device import GpuUnusable, gpu_visible, open_device

    wanted = settings.worker.engine == "triton"
    if not wanted and not gpu_visible():
        return None
    try:
        open_device()
        from baton.runner.triton_runner import TritonRunner

        return TritonRunner(settings)
    except (GpuUnusable, UnsupportedModel) as error:
        if wanted:
            raise
        log.warning("the GPU is not used: %s", error)
    return None


def _create_native(settings: Settings) -> Runner | None:
    """The native runner; None where `auto` has to do without it, which is told in one line."""
    from baton.models.errors import UnsupportedModel
    from baton.runner.native_choice import reason_against
    from baton_kernels.cpu.build import BuildError

    wanted = settings.worker.engine == "native"
    reason = "" if wanted else reason_against(settings)
    if not reason:
        from baton.runner.native_runner import NativeRunner

        try:
            return NativeRunner(settings, ledger=Path(settings.worker.shm_dir))
        except (BuildError, UnsupportedModel) as error:
            if wanted:
                raise
            reason = str(error)
    log.warning("torch engine, several times slower than the native one: %s", reason)
    return None
