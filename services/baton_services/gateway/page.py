"""The web page at `/`, one file without outside parts, and `/cluster`, which it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from baton.bus.directory import Directory
from baton.protocol.liveness import Heartbeat, Role
from baton_services.gateway.exchanges import Exchanges


class Page:
    """Handlers of the page. It may run its own script and style, and talk to this gateway; nothing else."""

    def __init__(self, directory: Directory, exchanges: Exchanges) -> None:
        self._directory = directory
        self._exchanges = exchanges
        self._html = files(__package__).joinpath("page.html").read_bytes()
        self._headers = {
            "Content-Security-Policy": _policy(self._html),
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def show(self, _: web.Request) -> web.Response:
        return web.Response(body=self._html, content_type="text/html", charset="utf-8", headers=self._headers)

    async def cluster(self, _: web.Request) -> web.Response:
        """Every live service and its load, as its last heartbeat told."""
        services = [_tell(beat) for role in Role for beat in self._directory.live(role, ready=False)]
        body = {"models": sorted(self._exchanges.models()), "services": services}
        return web.Response(
            body=msgspec.json.encode(body),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )


def _tell(beat: Heartbeat) -> dict[str, Any]:
    load = beat.load
    told: dict[str, Any] = {
        "role": beat.role,
        "id": beat.id,
        "model": beat.model,
        "state": beat.state,
        "note": beat.note,
        "started_ms": beat.started_ms,
        "load": None,
    }
    if load is not None:
        names = ("running", "waiting", "waiting_tokens", "blocks_used", "blocks_total")
        told["load"] = {name: getattr(load, name) for name in names}
    return told


def _policy(html: bytes) -> str:
    """A policy that allows exactly the script and style of this file."""

    def source(tag: bytes) -> str:
        found = re.search(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
        assert found is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {source(b'script')}; style-src {source(b'style')};"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
