"""`baton serve router`: answers where a request runs."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton_services.router.service import RouterService


def serve(settings: Settings, instance: str) -> int:
    """Runs one router until it is told to stop; returns the exit code."""
    return run_service(Role.ROUTER, settings, RouterService, instance=instance, model=settings.model.name)
