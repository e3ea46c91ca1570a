"""The first request: `ready` is said only after it has gone the whole way, the hand-off included."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from baton.cli.http import Api, ApiError
from baton.protocol import subjects
from baton.protocol.request import TextBatch, Timing

if TYPE_CHECKING:
    from baton.bus.connection import Bus

TRIES_S = 30.0
MOST_WORDS = 512
ANSWER_S = 120.0
TIMING_S = 2.0


class NoAnswer(Exception):
    """The whole way does not work, and why."""


async def first_request(bus: Bus, url: str, *, model: str, api_key: str, words: int) -> tuple[float, Timing]:
    """Asks for two tokens (one needs no hand-off) on a prompt of at least `words` tokens, if those are few.

    Returns the seconds until the answer and where they went, as the services say on the bus.

    Raises:
        NoAnswer: refused or failed for longer than services need to find each other.
    """
    # Different at each start, so that no cache that outlived the last run answers a part of it.
    # A high threshold is not outdone: that would cost more than the proof of a hand-off is worth.
    prompt = f"Start {time.time_ns()}:" + " baton" * (max(8, words) if words <= MOST_WORDS else 8)
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "min_tokens": 2, "temperature": 0}
    api = Api(url, api_key=api_key, timeout_s=ANSWER_S)
    inbox = await bus.inbox(subjects.text("*", 0).removesuffix("0") + "*", TextBatch, limit=1_024)
    try:
        deadline = time.monotonic() + TRIES_S
        while True:
            began = time.monotonic()
            try:
                await asyncio.to_thread(api.post, "/v1/completions", body)
                break
            except ApiError as error:
                # 429 and 503: not everybody has heard of everybody yet
                if error.status not in (0, 429, 503) or time.monotonic() > deadline:
                    raise NoAnswer(str(error)) from error
            await asyncio.sleep(0.1)
        took = time.monotonic() - began
        while True:
            delivery = await asyncio.wait_for(inbox.get(), TIMING_S)
            for delta in delivery.message.deltas:
                if delta.timing is not None:
                    return took, delta.timing
    except TimeoutError:
        return took, Timing()
    finally:
        inbox.close()


def describe(took: float, timing: Timing) -> str:
    """Where the first request's time went, in one line."""
    parts = [f"prefill {timing.prefill_ms:.0f} ms"]
    if timing.handoff_bytes:
        parts.append(
            f"{timing.handoff_bytes / 2**20:.2f} MB of KV handed from {timing.prefill_worker} to "
            f"{timing.decode_worker} over {timing.transport} in {timing.handoff_ms:.1f} ms"
        )
    return f"a first request went the whole way in {took * 1_000:.0f} ms: " + ", ".join(parts)
