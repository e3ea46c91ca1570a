"""The sender's end of a hand-off. See `handoff` for the picture."""

from __future__ import annotations

from baton.kvcache.handoff_states import OUTGOING, Announcement, Event, HandoffError, Machine, State
from baton.protocol.handoff import BlockRef


class Outgoing(Machine):
    """The sender's end."""

    def __init__(self, request: str, attempt: int, full_blocks: int, lease_ms: int, now: float) -> None:
        """A hand-off of a sequence that will have `full_blocks` full blocks when it is committed."""
        super().__init__(OUTGOING, State.NEW, request, attempt, lease_ms, now)
        self.hit_blocks = 0
        self._full_blocks = full_blocks
        self._ready: list[BlockRef] = []
        self._announced = 0  # blocks named to the receiver, or held by it already

    @property
    def owns_blocks(self) -> bool:
        """Whether the sequence's blocks must stay pinned here."""
        return not self.over

    def take_release(self) -> bool:
        """True once: the blocks are to be unpinned now."""
        due = self.over and not self._released
        self._released |= due
        return due

    def offer_sent(self, now: float) -> None:
        self._step(Event.OFFER_SENT)
        self._sign_of_life(now)

    def granted(self, hit_blocks: int, now: float) -> Announcement | None:
        """The receiver has room, and the first `hit_blocks` blocks already. Returns what to announce now."""
        first_time = self.state is State.OFFERED
        if first_time and not 0 <= hit_blocks <= self._full_blocks:
            raise HandoffError(f"the receiver claims {hit_blocks} of {self._full_blocks} blocks")
        self._step(Event.GRANTED)
        if not first_time or self.over:
            return None
        self._sign_of_life(now)
        self.hit_blocks = self._announced = hit_blocks
        return self._announce()

    def refused(self, reason: str) -> None:
        """The receiver will not take it: an answer to the offer or to the commit."""
        self._end(reason)

    def blocks_ready(self, first: int, refs: list[BlockRef], now: float) -> Announcement | None:
        """Blocks `first`, `first + 1`, ... are finished and pinned. Returns what to announce now.

        Raises:
            HandoffError: a gap, or more blocks than there are.
        """
        if first > len(self._ready) or first + len(refs) > self._full_blocks:
            raise HandoffError(
                f"blocks {first}..{first + len(refs)} after {len(self._ready)} of {self._full_blocks}"
            )
        self._ready += refs[len(self._ready) - first :]
        if self.state in (State.NEW, State.OFFERED):
            self._step(Event.READY)
            return None
        return None if self.over else self._announce_at(now)

    def commit_sent(self, now: float) -> None:
        """`Commit` went out, for the first time or again.

        Raises:
            HandoffError: blocks are missing that the receiver has not been told of.
        """
        if not self.over and self._announced < self._full_blocks:
            raise HandoffError(f"commit after {self._announced} of {self._full_blocks} blocks")
        self._step(Event.COMMIT)
        self._sign_of_life(now)

    def committed(self) -> None:
        """The receiver owns the sequence."""
        self._step(Event.COMMITTED)

    def renewed(self, now: float) -> None:
        """The receiver is still pulling."""
        self._step(Event.RENEWED)
        self._sign_of_life(now)

    def _announce_at(self, now: float) -> Announcement | None:
        self._sign_of_life(now)
        return self._announce()

    def _announce(self) -> Announcement | None:
        if self._announced >= len(self._ready):
            return None
        news = Announcement(self._announced, self._ready[self._announced :])
        self._announced = len(self._ready)
        self._step(Event.READY)
        return news
