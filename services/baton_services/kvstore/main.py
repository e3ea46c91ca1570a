"""The KV store's process."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service import run_service
from baton_services.kvstore.service import KvStore


def serve(settings: Settings, instance: str) -> int:
    """Runs a KV store until it is told to end; returns the exit code. It serves every model."""
    return run_service(Role.KVSTORE, settings, KvStore, instance=instance)
