"""TLS contexts from the files that settings name."""

from __future__ import annotations

import ssl


class TlsError(ValueError):
    """A certificate, key or CA file cannot be used; one line that names the files."""


def client_context(ca: str, cert: str = "", key: str = "", *, check_name: bool = True) -> ssl.SSLContext:
    """For connecting: the peer's certificate must be signed by `ca` (empty: one that the system trusts).

    Args:
        cert, key: shown to the peer, if given.
        check_name: the certificate must be the peer's by its name; without, any that `ca` has signed will do.

    Raises:
        TlsError: a file is missing or is not what it should be.
    """
    try:
        context = ssl.create_default_context(cafile=ca or None)
        context.check_hostname = check_name
        if cert:
            context.load_cert_chain(cert, key or None)
    except (OSError, ValueError) as error:
        raise TlsError(_words(error, ca, cert, key)) from error
    return context


def server_context(cert: str, key: str, ca: str = "") -> ssl.SSLContext:
    """For listening; with `ca`, whoever connects has to show a certificate signed by it.

    Raises:
        TlsError: as `client_context`.
    """
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(cert, key or None)
        if ca:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise TlsError(_words(error, ca, cert, key)) from error
    return context


def _words(error: Exception, *files: str) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    named = ", ".join(file for file in files if file) or "the system's certificates"
    return f"TLS files {named} cannot be used: {reason}"
