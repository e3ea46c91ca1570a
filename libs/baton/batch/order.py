"""Which requests share a prefix: a sort key that brings them together."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

STEPS = (64, 256, 1_024, 4_096, 16_384)  # bytes of prompt; 16 tokens or so, and four times as many each

Key = tuple[int, ...]


def prefix_key(endpoint: str, body: dict[str, Any]) -> Key:
    """Requests whose prompts begin with the same bytes have keys that begin with the same numbers.

    The number of equal bytes is known in steps only: what counts is that a cache's blocks are shared.
    """
    text = _prompt(endpoint, body)
    running = xxhash.xxh3_64()
    done, key = 0, []
    for step in STEPS:
        running.update(text[done:step])
        done = step
        key.append(running.intdigest())
    return tuple(key)


def _prompt(endpoint: str, body: dict[str, Any]) -> bytes:
    """What of a request reaches the model's prompt first, in that order."""
    if endpoint == "/v1/completions":
        return _bytes([body.get("prompt")])
    if endpoint == "/v1/responses":
        return _bytes([body.get("tools"), body.get("instructions"), body.get("input")])
    return _bytes([body.get("tools"), body.get("messages")])


def _bytes(parts: list[Any]) -> bytes:
    return b"".join(msgspec.json.encode(part) for part in parts if part is not None)[: STEPS[-1]]
