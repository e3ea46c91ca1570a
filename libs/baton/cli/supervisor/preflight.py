"""What is checked before anything is started, so that what is wrong is said at once and with its fix."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

from baton.config.settings import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class NotPossible(Exception):
    """Why nothing can be started here, and what to do about it."""


def check_port(host: str, port: int, what: str, option: str) -> None:
    """Can we listen there? Port 0 is any free one, and always possible.

    Raises:
        NotPossible: the port is taken (by whom, if it can be seen), forbidden, or the address is not ours.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)  # on macOS a bind alone passes beside another listener
        except socket.gaierror as error:
            raise NotPossible(f"{what}: {host} is no address of this machine ({error.strerror})") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NotPossible(
                    f"port {port}, wanted for {what}, is taken{_owner(port)}. "
                    f"Another one: {option} {port + 1}; any free one: {option} 0. "
                    "If it is a Baton of yours, `baton status` shows it."
                ) from error
            if error.errno == errno.EACCES:
                raise NotPossible(
                    f"port {port}, wanted for {what}, needs privileges; take one above 1023 with {option}"
                ) from error
            raise NotPossible(f"{what} cannot listen on {host}:{port}: {error.strerror}") from error


def _owner(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if local and local.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass  # who it is can only be seen of one's own processes, or as root
    return ""


def check_ports(settings: Settings) -> None:
    """Raises NotPossible unless the API and the metrics can listen where they are set to."""
    gateway, metrics = settings.gateway, settings.metrics
    check_port(gateway.host, gateway.port, "the HTTP API", "--port")
    check_port(metrics.host, metrics.port, "the metrics", "--metrics-port")
    if gateway.port and gateway.port == metrics.port:
        raise NotPossible(f"the HTTP API and the metrics both want port {gateway.port}; set --metrics-port")


def check_space(settings: Settings, workers: int) -> list[str]:
    """Is there room for the KV pools? Returns warnings.

    Raises:
        NotPossible: the pools do not fit where they are to lie.
    """
    wanted = settings.worker.kv_memory_mb * workers
    directory = settings.worker.shm_dir
    try:
        free = shutil.disk_usage(directory).free // 2**20
    except OSError as error:
        raise NotPossible(f"{directory}, where KV pools lie, cannot be used: {error.strerror}") from error
    if not os.access(directory, os.W_OK):
        raise NotPossible(
            f"{directory}, where KV pools lie, cannot be written to; --worker-shm-dir names another"
        )
    if wanted > free:
        raise NotPossible(
            f"{workers} KV pools of {settings.worker.kv_memory_mb} MB take {wanted} MB, and {directory} has "
            f"{free} MB free. Smaller ones: --kv-memory-mb {max(1, free // workers * 9 // 10)}; in a "
            "container, more shared memory (docker run --shm-size 2g)."
        )
    import psutil

    available = psutil.virtual_memory().available // 2**20
    if wanted + 300 * workers > available:
        return [f"memory is short: {available} MB are free, the workers may take {wanted + 300 * workers} MB"]
    return []


def open_to_all(settings: Settings) -> str:
    """A warning when others can reach the API without a key, else empty."""
    gateway = settings.gateway
    if gateway.api_key or gateway.keys_file or gateway.keys or gateway.host in LOOPBACK:
        return ""
    return (
        f"WARNING: the API listens on {settings.gateway.host}, which others can reach, and asks for no key. "
        "Anyone who gets there can use this machine's time and memory. Set a key (BATON_GATEWAY_API_KEY=... "
        "in the environment, or `baton key new`), put a server that checks callers in front, or leave out "
        "--host to stay on this machine."
    )


def cache_dir(settings: Settings) -> Path | None:
    """Where models lie; None: the default place."""
    return Path(settings.model.cache_dir).expanduser() if settings.model.cache_dir else None
