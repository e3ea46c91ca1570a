"""Who runs in the next step: one token budget, no phases.

A step is filled in this order:

1. every running sequence that lacks one token (decoding), highest class first, in it the oldest;
2. with what is left of the budget, chunks of whoever lacks more: by class; in it the running ones before
   the waiting ones, which are admitted one by one, in order, nobody overtaking one that does not fit.

Whoever is admitted gets blocks for all its known tokens at once, so only a decoding sequence ever needs
another, one at a time. If there is none, the newest of the lowest class is pre-empted: it gives up its
blocks (they stay cached) and waits ahead of all others. If that is the sequence itself, it pauses.
So the oldest of the highest class always goes on, and every sequence ends.

A newcomer must leave a watermark: a free block for each running sequence, up to 1 % of the pool. A higher
class takes places and blocks from lower ones at the next step.
"""

from __future__ import annotations

from bisect import insort

from baton.engine import chains
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.sequence import Sequence, Status

WATERMARK_SHARE = 100  # of the pool's blocks: 1 %


class Scheduler:
    """Two sorted lists, and the plan in the making."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.budget = config.max_batch_tokens  # tokens a step; the worker lowers it for a slow machine
        self.waiting: list[Sequence] = []  # by place in queue
        self.running: list[Sequence] = []  # by rank
        self.reserved = 0  # places promised to sequences that are being handed over
        self.blocked: Sequence | None = None  # the head of the queue, when it found no room
        self._room_when_blocked = 0
        self._plan: dict[Sequence, int] = {}

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The next step: each sequence in it, and how many of its missing tokens to compute."""
        self._plan = {}
        for seq in list(self.running):
            if seq.missing == 1 and seq.status is Status.RUNNING and self._grow(seq):
                self._plan[seq] = 1
        self._fill([seq for seq in self.running if seq.missing > 1])
        return list(self._plan.items())

    def enqueue(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=lambda other: other.place_in_queue)

    def start(self, seq: Sequence) -> None:
        """Run a sequence that has its blocks."""
        seq.status = Status.RUNNING
        insort(self.running, seq, key=lambda other: other.rank)

    def remove(self, seq: Sequence) -> None:
        """Forget a waiting or running sequence; its blocks are the caller's to free."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            if self.blocked is seq:
                self.blocked = None
        elif seq.status is Status.RUNNING:
            self.running.remove(seq)

    def claim(self, count: int, priority: int, *, preempt: bool = True) -> list[int] | None:
        """New blocks for one more sequence of this class, or None if it does not fit.

        Lower classes are pre-empted for it, newest first, unless all of them would not be enough.
        """
        if preempt and count > self.room():
            lower = [seq for seq in self.running if seq.priority < priority]
            if self.pool.free + sum(len(seq.blocks) for seq in lower) >= count:
                while lower and count > self.room():
                    self._preempt(lower.pop())
        return self.pool.allocate(count) if count <= self.room() else None

    def room(self) -> int:
        """Blocks that a newcomer may take; negative if there is no place for it."""
        return self._spare() if self._has_place() else -1

    def lend(self, count: int) -> list[int] | None:
        """New blocks for something else than a sequence: only what no sequence waits for."""
        wanted = self.blocked is not None and self._has_place()
        return self.pool.allocate(count) if count <= self._spare() and not wanted else None

    def _has_place(self) -> bool:
        return len(self.running) + self.reserved < self.config.max_running

    def _spare(self) -> int:
        """Free blocks above the watermark."""
        busy = len(self.running) + self.reserved
        return self.pool.free - min(busy, max(1, self.pool.num_blocks // WATERMARK_SHARE))

    def _fill(self, unread: list[Sequence]) -> None:
        """Spend the rest of the budget on running sequences that lack several tokens and on waiting ones."""
        unread.reverse()
        admitting = True
        while (budget := self.budget - sum(self._plan.values())) > 0:
            head = self.waiting[0] if self.waiting and admitting else None
            if head is not None and not (unread and unread[-1].priority >= head.priority):
                admitting = self._admit(head)
                seq = head
            elif unread:
                seq = unread.pop()
            else:
                break
            if seq.status is Status.RUNNING and self._grow(seq):
                self._plan[seq] = min(seq.missing, budget)

    def _admit(self, seq: Sequence) -> bool:
        """Give the head of the queue its blocks, cached ones first, if there is room for it."""
        if seq is self.blocked and self.room() <= self._room_when_blocked and self.running:
            return False  # nothing has been freed since: spare the look-up
        size = self.pool.block_size
        hits: list[int] = []
        if self.config.prefix_cache:
            hits = self.pool.match(chains.of(seq, 0, seq.readable // size, size))
        slots = self.claim(-(-seq.known // size) - len(hits), seq.priority)
        if slots is None:
            self.pool.release(hits)
            self.blocked, self._room_when_blocked = seq, self.room()
            return False
        self.remove(seq)
        seq.blocks = hits + slots
        seq.computed = len(hits) * size
        if not seq.preemptions:
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
        self.start(seq)
        return True

    def _grow(self, seq: Sequence) -> bool:
        """See to it that a running sequence has blocks for all known tokens; False: it must pause."""
        while len(seq.blocks) * self.pool.block_size < len(seq.tokens):
            slots = self.pool.allocate(1)
            if slots is not None:
                seq.blocks += slots
            elif self.running[-1] is seq:
                return False
            else:
                self._preempt(self.running[-1])
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's place and blocks; it goes on later from what is still cached."""
        self.running.remove(seq)
        self._plan.pop(seq, None)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.announced = 0
        seq.preemptions += 1
        self.enqueue(seq)
