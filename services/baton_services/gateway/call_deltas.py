"""Pieces of tool calls on their way through the gateway: none twice, none missing, one a call when merged."""

from __future__ import annotations

from collections.abc import Iterable

from baton.protocol.request import CallDelta


def fresh(calls: list[CallDelta], taken: list[int]) -> list[CallDelta]:
    """What of these pieces is new.

    `taken` is the characters of each call's arguments taken so far, and brought up to date. Nothing before
    the pieces is missing.
    """
    out = []
    for call in calls:
        begins = call.index == len(taken)
        if begins:
            taken.append(0)
        seen = max(0, taken[call.index] - call.start)
        piece = call.arguments[seen:]
        if begins or piece:
            name = (call.id, call.name) if begins else ("", "")
            out.append(CallDelta(call.index, *name, piece, taken[call.index]))
        taken[call.index] += len(piece)
    return out


def merged(groups: Iterable[list[CallDelta]]) -> list[CallDelta]:
    """Pieces that follow each other, joined to one a call."""
    out: list[CallDelta] = []
    for calls in groups:
        for call in calls:
            if out and out[-1].index == call.index:
                out[-1].arguments += call.arguments
            else:
                out.append(call)
    return out
