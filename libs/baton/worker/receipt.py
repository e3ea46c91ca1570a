"""One hand-off on its way in, as the receiver keeps it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.bus.inbox import Delivery
from baton.engine.reservations import Reservation
from baton.kvcache.incoming import Incoming
from baton.kvcache.pull import PullStats
from baton.protocol.handoff import BlockRef, Commit, Offer


@dataclass(slots=True, eq=False)
class Receipt:
    """The state machine, the reserved slots, and what was moved. Its owner is the task of `Receiver.run`."""

    offer: Offer
    reservation: Reservation
    handoff: Incoming
    since: float  # monotonic seconds
    deadline: float  # monotonic seconds; the request's own
    wanted: dict[int, BlockRef] = field(default_factory=dict)  # named, not pulled yet
    commit: Commit | None = None
    reply: Delivery | None = None  # the newest commit's, which the outcome answers
    committed_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    pull: asyncio.Future[PullStats] | None = None  # the copy under way
    unwanted: bool = False  # given up because nobody wants it any more; no fault
    bytes: int = 0
    seconds: float = 0.0
    transport: str = ""

    def end(self, reason: str) -> None:
        """Gives the hand-off up. What it holds is freed once nothing writes to it any more."""
        self.handoff.abandoned(reason)
        self.changed.set()
        if self.pull is not None:
            self.pull.cancel()

    def slots(self, indices: list[int]) -> list[int]:
        """Where these blocks, by their index in the sequence, go."""
        return [self.reservation.slots[index - self.reservation.hit_blocks] for index in indices]
