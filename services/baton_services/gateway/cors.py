"""Pages of other sites that may use this API from their visitors' browsers (the Fetch standard's CORS)."""

from __future__ import annotations

import re

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

ANY = "*"
METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED = (
    "x-request-id, retry-after, retry-after-ms, server-timing, x-ratelimit-limit-requests,"
    " x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens,"
    " x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
MAX_AGE_S = 600  # a browser remembers a preflight's answer for so long

_origin = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*?#]+|null")
_names = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")


class Cors:
    """The origins let in.

    Raises:
        ValueError: one is no origin.
    """

    def __init__(self, origins: list[str]) -> None:
        for origin in origins:
            if origin != ANY and not _origin.fullmatch(origin):
                raise ValueError(
                    f"gateway.cors: {origin!r} is no origin; write https://host or http://host:port, or *"
                )
        self._origins = frozenset(origins)

    def headers(self, request: web.Request) -> dict[str, str]:
        """What every answer to a page carries; nothing where no other site is let in."""
        if not self._origins:
            return {}
        origin = request.headers.get("Origin", "")
        shared = {"Access-Control-Expose-Headers": EXPOSED}
        if ANY in self._origins:
            return {"Access-Control-Allow-Origin": ANY, **shared} if origin else {}
        if origin in self._origins:
            return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **shared}
        return {"Vary": "Origin"}  # a shared cache must not give this answer to a page that is let in

    def middleware(self) -> Middleware:
        """Answers preflights, which carry no key, of the origins let in."""

        @web.middleware
        async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
            asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not asks or "Access-Control-Allow-Origin" not in self.headers(request):
                return await handler(request)
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            headers = {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": wanted
                if _names.fullmatch(wanted)
                else "Authorization, Content-Type",
                "Access-Control-Max-Age": str(MAX_AGE_S),
            }
            return web.Response(status=204, headers=headers)

        return preflights
