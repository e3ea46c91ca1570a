"""States, events and transition tables of the hand-off, and what both ends share. See `handoff`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.protocol.handoff import BlockRef


class HandoffError(Exception):
    """A message that the peer cannot honestly have sent in this state."""


class State(enum.Enum):
    NEW = "new"
    OFFERED = "offered"
    GRANTED = "granted"
    SENDING = "sending"
    RESERVED = "reserved"
    PULLING = "pulling"
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"


class Event(enum.Enum):
    OFFER_SENT = "offer sent"
    GRANTED = "granted"
    READY = "ready"
    COMMIT = "commit"
    COMMITTED = "committed"
    ADMITTED = "admitted"
    RENEWED = "renewed"
    ENDED = "ended"  # refused, abandoned, lease over, peer lost, pull failed


Table = dict[State, dict[Event, State]]

OUTGOING: Table = {
    State.NEW: {
        Event.READY: State.NEW,
        Event.OFFER_SENT: State.OFFERED,
        Event.ENDED: State.FAILED,
    },
    State.OFFERED: {
        Event.READY: State.OFFERED,
        Event.GRANTED: State.GRANTED,
        Event.ENDED: State.FAILED,
    },
    State.GRANTED: {
        Event.READY: State.SENDING,
        Event.GRANTED: State.GRANTED,
        Event.RENEWED: State.GRANTED,
        Event.COMMIT: State.COMMITTING,
        Event.ENDED: State.FAILED,
    },
    State.SENDING: {
        Event.READY: State.SENDING,
        Event.GRANTED: State.SENDING,
        Event.RENEWED: State.SENDING,
        Event.COMMIT: State.COMMITTING,
        Event.ENDED: State.FAILED,
    },
    State.COMMITTING: {
        Event.GRANTED: State.COMMITTING,
        Event.RENEWED: State.COMMITTING,
        Event.COMMIT: State.COMMITTING,  # sent again when the answer stays away
        Event.COMMITTED: State.DONE,
        Event.ENDED: State.FAILED,
    },
    State.DONE: dict.fromkeys(Event, State.DONE),
    State.FAILED: dict.fromkeys(Event, State.FAILED),
}

INCOMING: Table = {
    State.RESERVED: {
        Event.READY: State.PULLING,
        Event.COMMIT: State.COMMITTING,
        Event.ENDED: State.FAILED,
    },
    State.PULLING: {
        Event.READY: State.PULLING,
        Event.COMMIT: State.COMMITTING,
        Event.ENDED: State.FAILED,
    },
    State.COMMITTING: {
        Event.READY: State.COMMITTING,  # a duplicate
        Event.COMMIT: State.COMMITTING,  # a duplicate
        Event.ADMITTED: State.DONE,
        Event.ENDED: State.FAILED,
    },
    State.DONE: dict.fromkeys(Event, State.DONE),
    State.FAILED: dict.fromkeys(Event, State.FAILED),
}


@dataclass(slots=True)
class Announcement:
    """Blocks to name in one `Ready`: `refs[i]` is block `first + i` of the sequence."""

    first: int
    refs: list[BlockRef]


class Machine:
    """What both ends share: the state, the lease, and giving back what is held exactly once."""

    def __init__(
        self, table: Table, state: State, request: str, attempt: int, lease_ms: int, now: float
    ) -> None:
        self.request = request
        self.attempt = attempt
        self.state = state
        self.reason = ""  # why it failed
        self._table = table
        self._lease_s = lease_ms / 1000
        self._deadline = now + self._lease_s
        self._released = False

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    @property
    def next_deadline(self) -> float | None:
        """When `lease_expired` is due unless there is a sign of life before; None when over."""
        return None if self.over else self._deadline

    def _step(self, event: Event) -> None:
        after = self._table[self.state].get(event)
        if after is None:
            raise HandoffError(f"{event.value!r} cannot come while a hand-off is {self.state.value}")
        self.state = after

    def _sign_of_life(self, now: float) -> None:
        self._deadline = max(self._deadline, now + self._lease_s)

    def _end(self, reason: str) -> None:
        if not self.over:
            self.reason = reason
        self._step(Event.ENDED)

    def abandoned(self, reason: str = "") -> None:
        """Either side gave it up, or the request was cancelled."""
        self._end(reason or "abandoned")

    def peer_lost(self) -> None:
        """The other worker is gone, or is of another epoch now."""
        self._end("the other worker is gone")

    def lease_expired(self, now: float) -> bool:
        """Ends the hand-off if its lease is over; says whether it did. A timer may come too early."""
        if self.over or now < self._deadline:
            return False
        self._end(f"no sign of life for {self._lease_s:g} s")
        return True
