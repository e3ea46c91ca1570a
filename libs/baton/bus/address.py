"""Which of this machine's addresses the rest of the cluster can reach."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

AUTO = "auto"


def own_address(setting: str, bus_url: str) -> str:
    """`setting`, or for `auto` the address of the interface that leads to the NATS server. Sends nothing.

    Raises:
        OSError: for `auto`, there is no way to that server.
    """
    if setting != AUTO:
        return setting
    first = bus_url.split(",")[0].strip()
    parts = urlsplit(first if "://" in first else f"nats://{first}")
    failure: OSError = OSError(f"no way to {parts.hostname}")
    found = socket.getaddrinfo(parts.hostname, parts.port or 4222, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure
