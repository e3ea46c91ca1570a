"""Pieces of tool calls on their way through the gateway: none twice, none missing, one a call when merged."""

from __future__ import annotations

from collections.abc import Iterable

from baton.protocol.request import CallDelta


def gap(calls: list[CallDelta], taken: list[int]) -> bool:
    """Whether something before these pieces is missing. `taken`: characters of each call taken so far."""
    lengths = list(taken)
    for call in calls:
        if call.index > len(lengths) or (call.index < len(lengths) and call.start > lengths[call.index]):
            return True
        if call.index == len(lengths):
            if call.start:
                return True
            lengths.append(0)
        lengths[call.index] = max(lengths[call.index], call.start + len(call.arguments))
    return False


def fresh(calls: list[CallDelta], taken: list[int]) -> list[CallDelta]:
    """What of these pieces is new; `taken` is brought up to date. There is no gap."""
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
