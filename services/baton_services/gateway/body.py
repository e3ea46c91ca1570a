"""Reading a request's body: bounded in size and in time, JSON only."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton_services.gateway.errors import HttpError

IDLE_S = 15.0  # without a byte of the body
TOTAL_S = 120.0

BODY_LIMIT = web.AppKey("body_limit", int)

# Ends the connection after the answer: what is left of the body is not worth reading. aiohttp goes on
# taking (and dropping) bytes for a few seconds, so that the client reads the answer and sees no reset.
_CLOSE = {"Connection": "close"}


async def read_json(http: web.Request) -> bytes:
    """The body of a JSON request, at most `BODY_LIMIT` bytes, decompressed if need be.

    Raises:
        HttpError: 415 not JSON, 413 too large (before a byte is read if the length is declared),
            408 too slow, 400 cut short or wrongly compressed.
    """
    refusal = _refusal(http)
    if refusal is not None:
        raise refusal
    limit = http.app[BODY_LIMIT]
    chunks: list[bytes] = []
    size, until = 0, time.monotonic() + TOTAL_S
    try:
        while True:
            async with asyncio.timeout(min(IDLE_S, until - time.monotonic())):
                chunk = await http.content.readany()
            if not chunk:
                return b"".join(chunks)
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except TimeoutError as error:
        words = f"the body came too slowly: nothing for {IDLE_S:g} s, or not complete in {TOTAL_S:g} s"
        raise HttpError(408, words, code="request_timeout", headers=_CLOSE) from error
    except (HttpProcessingError, web.RequestPayloadError) as error:
        words = "the body is cut short, or not encoded as its headers say"
        raise HttpError(400, words, code="invalid_request", headers=_CLOSE) from error


async def expect(http: web.Request) -> None:
    """`Expect: 100-continue`: says "go on" only if the body would be read; the handler refuses the others."""
    wanted = http.headers.get("Expect", "").lower() == "100-continue" and http.version >= (1, 1)
    if wanted and _refusal(http) is None:
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # what was written is no part of the answer


def _refusal(http: web.Request) -> HttpError | None:
    """What the headers alone already rule out.

    Other content types are refused although their bodies might be JSON: a page of another site can send
    `text/plain` from a visitor's browser without asking, but not `application/json`.
    """
    charset = (http.charset or "utf-8").lower()
    if http.content_type != "application/json" or charset not in ("utf-8", "utf8", "us-ascii"):
        given = http.headers.get("Content-Type", "none")[:100]
        words = f"send Content-Type: application/json (in UTF-8), not {given!r}"
        return HttpError(415, words, code="unsupported_content_type", headers=_CLOSE)
    limit = http.app[BODY_LIMIT]
    return _too_large(limit) if (http.content_length or 0) > limit else None


def _too_large(limit: int) -> HttpError:
    words = f"the body is larger than the {limit >> 20} MB that gateway.max_body_mb allows"
    return HttpError(413, words, code="request_too_large", headers=_CLOSE)
