"""`truncation: auto`: as few of a conversation's oldest items dropped as make it fit the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from baton_services.gateway.responses.items import Json


async def fewest(count: int, fits: Callable[[int], Awaitable[bool]]) -> int:
    """How many of `count` items to drop; the last one stays, whether it fits or not.

    Args:
        fits: whether the rest fits when so many are dropped; asked about the logarithm of `count` times.
    """
    if count < 2 or await fits(0):
        return 0
    low, high = 1, count - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def dropped(items: list[Json], places: list[str], count: int) -> tuple[list[Json], list[str]]:
    """Without the first `count` items, and without results whose calls were among them."""
    gone = {item["call_id"] for item in items[:count] if item["type"] == "function_call"}
    kept = [
        (item, place)
        for item, place in zip(items[count:], places[count:], strict=True)
        if item["type"] != "function_call_output" or item["call_id"] not in gone
    ]
    return [item for item, _ in kept], [place for _, place in kept]
