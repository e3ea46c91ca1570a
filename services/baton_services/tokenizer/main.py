"""`baton serve tokenizer`: text to tokens and back; owns live requests."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.host import run_service
from baton_services.tokenizer.service import TokenizerService


def serve(settings: Settings, instance: str) -> int:
    """Runs one tokenizer until it is told to stop; returns the exit code."""
    return run_service(
        Role.TOKENIZER, settings, TokenizerService, instance=instance, model=settings.model.name
    )
