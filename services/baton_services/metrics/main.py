"""`baton serve metrics`: the cluster's metrics on one page."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton_services.metrics.service import MetricsService


def serve(settings: Settings, instance: str) -> int:
    """Runs the metrics service until it is told to end; returns the exit code."""
    return run_service(Role.METRICS, settings, MetricsService, instance=instance)
