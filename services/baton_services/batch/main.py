"""`baton serve batch`: asynchronous jobs, run in the gaps that interactive traffic leaves."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton_services.batch.service import BatchService


def serve(settings: Settings, instance: str) -> int:
    """Runs one batch service until it is told to stop; returns the exit code."""
    return run_service(Role.BATCH, settings, BatchService, instance=instance)
