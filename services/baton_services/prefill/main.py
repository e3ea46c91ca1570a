"""`baton serve prefill`: runs prompts, hands KV blocks and the first token over to decode."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton.worker.worker import Worker


def serve(settings: Settings, instance: str) -> int:
    """Runs one prefill worker until it is told to stop; returns the exit code."""
    return run_service(Role.PREFILL, settings, Worker, instance=instance, model=settings.model.name)
