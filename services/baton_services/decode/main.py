"""`baton serve decode`: receives KV blocks, runs the token loop, streams."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton.worker.worker import Worker


def serve(settings: Settings, instance: str) -> int:
    """Runs one decode worker until it is told to stop; returns the exit code."""
    return run_service(Role.DECODE, settings, Worker, instance=instance, model=settings.model.name)
