"""`baton serve gateway`: HTTP and nothing else."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton_services.gateway.service import GatewayService


def serve(settings: Settings, instance: str) -> int:
    """Runs one gateway until it is told to stop; returns the exit code."""
    return run_service(Role.GATEWAY, settings, GatewayService, instance=instance)
