"""HTTPS, where a certificate is set."""

from __future__ import annotations

import ssl

from baton.config.settings import GatewaySettings
from baton.config.tls import TlsError, server_context
from baton.service.base import StartupError


def https(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Of a gateway that speaks HTTPS.

    Raises:
        StartupError: its files cannot be used.
    """
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise StartupError("gateway.tls_cert and gateway.tls_key go together")
    try:
        return server_context(settings.tls_cert, settings.tls_key)
    except TlsError as error:
        raise StartupError(str(error)) from error
