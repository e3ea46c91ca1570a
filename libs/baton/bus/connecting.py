"""The first connection to a NATS server: tried until it stands, or why it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import nats.errors

from baton.bus.client import PING_INTERVAL_S, PINGS_OUT, Backoff, BusClient
from baton.bus.errors import BusDown, BusRefused
from baton.config.settings import BusSettings
from baton.config.tls import TlsError, client_context
from baton.protocol import subjects
from baton.protocol.codec import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2
CLOSE_S = 0.5

ErrorCallback = Callable[[Exception], Awaitable[None]]


def shown(url: str) -> str:
    """A server list as it may be shown: scheme, host and port, never credentials."""
    places = []
    for one in url.split(","):
        parts = urlsplit(one.strip() if "://" in one else f"nats://{one.strip()}")
        try:
            port = parts.port or 4222
        except ValueError:
            places.append("(not a URL)")
        else:
            places.append(f"{parts.scheme}://{parts.hostname or '(no host)'}:{port}")
    return ",".join(places)


async def connect_client(
    settings: BusSettings,
    *,
    name: str,
    wait_s: float,
    lost: Callable[[], None],
    reconnected: Callable[[], Awaitable[None]],
    error: ErrorCallback,
) -> BusClient:
    """A connected client, after as many attempts as fit in `wait_s`.

    Raises:
        BusRefused: the server refuses the credentials, or takes messages of less than 8 MB.
        BusDown: no server was reached in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    backoff = Backoff()
    place = shown(settings.url)
    if "(" in place:
        raise BusRefused(f"bus.url names no server ({place}): it looks like nats://127.0.0.1:4222")
    for attempt in itertools.count():
        client = BusClient(lost)
        cause = await _try(client, settings, name, reconnected, max(0.1, deadline - loop.time()))
        if cause is None and client.max_payload >= MAX_MESSAGE_BYTES:
            client._error_cb = error
            return client
        client.abort()
        with contextlib.suppress(TimeoutError):  # after a TLS handshake that failed it would wait for ever
            async with asyncio.timeout(CLOSE_S):
                await client.close()
        if cause is None:
            raise BusRefused(
                f"the NATS server at {place} takes messages of {client.max_payload} bytes at most,"
                f" Baton needs {MAX_MESSAGE_BYTES}: set `max_payload: 8MB` in the server's configuration"
            )
        if "authorization violation" in cause.lower():
            raise BusRefused(
                f"the NATS server at {place} refuses the credentials of user {settings.user!r}:"
                " set bus.user and bus.password (BATON_BUS_USER, BATON_BUS_PASSWORD) to those of the server"
            )
        delay = backoff.next_s()
        if loop.time() + delay >= deadline:
            raise BusDown(
                f"no NATS server at {place} after {wait_s:g} s ({cause}):"
                " start it (`baton up` does), or name the right one with bus.url (BATON_BUS_URL)"
            )
        if attempt == 0:
            _log.info("waiting for the NATS server at %s (%s)", place, cause)
        await asyncio.sleep(delay)
    raise AssertionError("unreachable")


async def _try(
    client: BusClient,
    settings: BusSettings,
    name: str,
    reconnected: Callable[[], Awaitable[None]],
    timeout_s: float,
) -> str | None:
    """One attempt to connect. None, or why it failed."""
    causes: list[Exception] = []
    tls = None
    if any(one.strip().startswith("tls://") for one in settings.url.split(",")):
        try:
            tls = client_context(settings.tls_ca, settings.tls_cert, settings.tls_key)
        except TlsError as error:
            raise BusRefused(f"{error}: see bus.tls_ca, bus.tls_cert and bus.tls_key") from error

    async def report(cause: Exception) -> None:
        causes.append(cause)

    try:
        async with asyncio.timeout(timeout_s):
            await client.connect(
                servers=[one.strip() for one in settings.url.split(",")],
                name=name,
                error_cb=report,
                reconnected_cb=reconnected,
                reconnect_to_server_handler=client.choose,
                allow_reconnect=False,  # for this attempt: nats-py would retry a wrong password for ever
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=PINGS_OUT,
                pending_size=-1,
                user=settings.user or None,
                password=settings.password if settings.user else None,
                inbox_prefix=subjects.inbox(settings.user),
                tls=tls,
            )
    except (OSError, nats.errors.Error) as last:
        return _words(causes[-1] if isinstance(last, nats.errors.NoServersError) and causes else last)
    if not client.is_connected:
        return "the server closed the connection"
    client.options["allow_reconnect"] = True
    client.options["max_reconnect_attempts"] = -1
    return None


def _words(cause: Exception) -> str:
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    if isinstance(cause, TimeoutError):
        return "no answer"
    return str(cause) or type(cause).__name__
