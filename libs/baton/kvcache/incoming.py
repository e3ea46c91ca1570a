"""The receiver's end of a hand-off. See `handoff` for the picture."""

from __future__ import annotations

from baton.kvcache.handoff_states import INCOMING, Event, HandoffError, Machine, State
from baton.protocol.handoff import BlockRef


class Incoming(Machine):
    """The receiver's end. Blocks go by their index in the sequence; the partial one comes last."""

    def __init__(
        self,
        request: str,
        attempt: int,
        epoch: int,
        full_blocks: int,
        hit_blocks: int,
        lease_ms: int,
        now: float,
    ) -> None:
        """Room is reserved for the blocks of a sender of `epoch`; the first `hit_blocks` are here, pinned."""
        super().__init__(INCOMING, State.RESERVED, request, attempt, lease_ms, now)
        self.epoch = epoch
        self.hit_blocks = hit_blocks
        self._full_blocks = full_blocks
        self._expected: int | None = None  # blocks in all, the partial one included: known at the commit
        self._told: dict[int, BlockRef] = {}
        self._pulling: set[int] = set()
        self._verified: set[int] = set(range(hit_blocks))
        self._renewed = now

    @property
    def owns_blocks(self) -> bool:
        """Whether the reserved slots belong to this hand-off (not to a sequence, and not given back)."""
        return self.state is not State.DONE and not self._released

    @property
    def complete(self) -> bool:
        """The commit is here and every block is verified: `admitted` may follow."""
        return self.state is State.COMMITTING and not self.missing()

    def missing(self) -> list[int]:
        """Blocks not here yet, of those that the commit, or before it the announcements, speak of."""
        known = range(self._expected) if self._expected is not None else sorted(self._told)
        return [index for index in known if index not in self._verified]

    def take_release(self) -> bool:
        """True once: the reserved slots are to be given back now. Not while a pull still writes to them."""
        due = self.state is State.FAILED and not self._pulling and not self._released
        self._released |= due
        return due

    def ready(self, epoch: int, first: int, refs: list[BlockRef], now: float) -> dict[int, BlockRef]:
        """The sender has finished blocks. Returns those to pull now; mark them with `pull_started`.

        Raises:
            HandoffError: blocks beyond the sequence.
        """
        if epoch != self.epoch or self.over:
            return {}
        if first < 0 or first + len(refs) > self._full_blocks:
            raise HandoffError(f"blocks {first}..{first + len(refs)} of a sequence of {self._full_blocks}")
        self._step(Event.READY)
        self._sign_of_life(now)
        return self._tell(dict(enumerate(refs, start=first)))

    def commit(
        self, epoch: int, full_blocks: int, partial: BlockRef | None, now: float
    ) -> dict[int, BlockRef]:
        """The sequence is ours once its blocks are here. Returns what is still to be pulled.

        A repeated commit changes nothing; after DONE the caller answers `Committed` again.

        Raises:
            HandoffError: blocks were never announced (a message was lost), or their number is another one.
        """
        if epoch != self.epoch or self.over:
            return {}
        if full_blocks != self._full_blocks:
            raise HandoffError(f"commit of {full_blocks} full blocks, {self._full_blocks} were offered")
        unknown = [
            index for index in range(full_blocks) if index not in self._verified and index not in self._told
        ]
        if unknown:
            raise HandoffError(f"commit, but {len(unknown)} blocks from {unknown[0]} on were never announced")
        self._step(Event.COMMIT)
        self._sign_of_life(now)
        self._expected = full_blocks + (partial is not None)
        return self._tell({full_blocks: partial} if partial is not None else {})

    def _tell(self, refs: dict[int, BlockRef]) -> dict[int, BlockRef]:
        fresh = {i: ref for i, ref in refs.items() if i not in self._told and i not in self._verified}
        self._told |= fresh
        return fresh

    def pull_started(self, indices: list[int]) -> bool:
        """A pull into these blocks' slots begins; False: the hand-off is over, do not start it."""
        if self.over:
            return False
        self._pulling.update(indices)
        return True

    def pull_done(self, indices: list[int], now: float) -> None:
        """The pull has ended and every block is verified."""
        self._pulling.difference_update(indices)
        if not self.over:
            self._verified.update(indices)
            self._sign_of_life(now)

    def pull_failed(self, indices: list[int], reason: str) -> None:
        """The pull has ended without these blocks."""
        self._pulling.difference_update(indices)
        self._end(reason)

    def admitted(self) -> None:
        """The sequence runs here and owns the blocks.

        Raises:
            HandoffError: blocks or the commit are missing.
        """
        if not self.over and not self.complete:
            raise HandoffError(f"admitted while {self.state.value}, missing blocks {self.missing()}")
        self._step(Event.ADMITTED)

    def renew_due(self, now: float) -> bool:
        """Whether to send `Renew`: while pulling, three times a lease."""
        if self.over or not self._pulling or now < self._renewed + self._lease_s / 3:
            return False
        self._renewed = now
        return True
