"""Cutting and joining `PromptRows`: packed log-probabilities of a prompt's tokens."""

from __future__ import annotations

from baton.protocol.codec import MalformedMessage
from baton.protocol.sampling import PromptRows


def count(rows: PromptRows, prompt_len: int) -> int:
    """How many tokens of a prompt they are of.

    Raises:
        MalformedMessage: the three lengths do not go together, or it is shorter.
    """
    tokens, rest = divmod(len(rows.chosen), 4)
    wide = len(rows.top)
    if rest or not tokens or wide != len(rows.top_ids) or wide % (4 * tokens):
        raise MalformedMessage(f"rows of a prompt: {len(rows.chosen)} and {wide} bytes")
    if rows.start < 1 or rows.start + tokens > prompt_len:
        raise MalformedMessage(f"{tokens} rows from {rows.start} on, of a prompt of {prompt_len}")
    return tokens


def width(rows: PromptRows) -> int:
    """How many of the most likely ids each of them has."""
    return len(rows.top) // len(rows.chosen)


def cut(rows: PromptRows, start: int) -> PromptRows | None:
    """The rows from position `start` on; None if there are none."""
    skip = 4 * max(0, start - rows.start)
    if skip >= len(rows.chosen):
        return None
    wide = skip * width(rows)
    return PromptRows(
        start=rows.start + skip // 4,
        chosen=rows.chosen[skip:],
        top_ids=rows.top_ids[wide:],
        top=rows.top[wide:],
    )


def joined(first: PromptRows, second: PromptRows) -> PromptRows:
    """Rows and those that follow them."""
    return PromptRows(
        start=first.start,
        chosen=first.chosen + second.chosen,
        top_ids=first.top_ids + second.top_ids,
        top=first.top + second.top,
    )
