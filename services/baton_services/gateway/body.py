"""Reading a request's body: bounded in size and in time, JSON only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.protocol.errors import Code, Failure, RequestError
from baton_services.gateway.errors import HttpError, refused


@dataclass(slots=True)
class Bodies:
    """What may come in: bytes of one body and of all at once, seconds without a byte and in all."""

    limit: int
    limit_held: int
    idle_s: float
    total_s: float
    held: int = 0  # bytes of bodies that are still coming in


BODIES = web.AppKey("bodies", Bodies)
SIZE = "body_size"  # request[SIZE]: bytes of the body that was read

# Ends the connection after the answer: what is left of the body is not worth reading. aiohttp goes on
# taking (and dropping) bytes for a few seconds, so that the client reads the answer and sees no reset.
_CLOSE = {"Connection": "close"}


async def read_json(http: web.Request) -> bytes:
    """The body of a JSON request, decompressed if need be, within the application's `BODIES`.

    Raises:
        HttpError: 415 not JSON, 413 too large (before a byte is read if the length is declared),
            408 too slow, 400 cut short or wrongly compressed.
        RequestError: too many bodies are coming in already.
    """
    refusal = _refusal(http)
    if refusal is not None:
        raise refusal
    bodies = http.app[BODIES]
    chunks: list[bytes] = []
    size, until = 0, time.monotonic() + bodies.total_s
    try:
        while True:
            async with asyncio.timeout(min(bodies.idle_s, until - time.monotonic())):
                chunk = await http.content.readany()
            if not chunk:
                http[SIZE] = size
                return b"".join(chunks)
            size += len(chunk)
            bodies.held += len(chunk)
            if size > bodies.limit:
                raise _too_large(bodies.limit)
            if bodies.held > bodies.limit_held:
                raise RequestError(_TOO_MANY)
            chunks.append(chunk)
    except TimeoutError as error:
        words = (
            f"the body came too slowly: nothing for {bodies.idle_s:g} s (gateway.body_idle_s),"
            f" or not complete in {bodies.total_s:g} s (gateway.body_s)"
        )
        raise refused("request_timeout", words, headers=_CLOSE) from error
    except (HttpProcessingError, web.RequestPayloadError) as error:
        words = "the body is cut short, or not encoded as its headers say"
        raise refused("invalid_request", words, headers=_CLOSE) from error
    finally:
        bodies.held -= size


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
        return refused("unsupported_content_type", words, headers=_CLOSE)
    limit = http.app[BODIES].limit
    return _too_large(limit) if (http.content_length or 0) > limit else None


_TOO_MANY = Failure(
    code=Code.OVERLOADED, message="too many large requests are coming in at once", retry_after_ms=1_000
)


def _too_large(limit: int) -> HttpError:
    words = f"the body is larger than the {limit >> 20} MB that gateway.max_body_mb allows"
    return refused("request_too_large", words, headers=_CLOSE)
