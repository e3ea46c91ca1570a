"""Lists in pages, as OpenAI's clients walk through them."""

from __future__ import annotations

from typing import Any, TypeVar

from aiohttp import web

from baton.batch.records import File, Job
from baton_services.gateway.errors import invalid

T = TypeVar("T", File, Job)


def limit(http: web.Request, default: int, most: int) -> int:
    text = http.query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:9]) <= most:
        raise invalid(f"limit: is 1 to {most}", "limit")
    return int(text)


def page(http: web.Request, found: list[T], size: int) -> tuple[list[T], bool]:
    """Those after `after`, and whether there are more.

    Raises:
        RequestError: there is none of that id.
    """
    after = http.query.get("after", "")
    start = 0
    if after:
        start = next((index for index, one in enumerate(found, 1) if one.id == after), -1)
        if start < 0:
            raise invalid(f"after: there is nothing with the id {after[:80]!r}", "after")
    return found[start : start + size], len(found) > start + size


def listed(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": more,
    }
