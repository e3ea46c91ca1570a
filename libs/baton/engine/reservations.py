"""The receiving side of a hand-off: slots to pull into first, a running sequence at the commit.

reserve -> (the worker pulls the peer's blocks into `slots`) -> admit
                                                    `-------> cancel
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine import chains
from baton.engine.block_pool import BlockPool
from baton.engine.checks import check_fits, check_new
from baton.engine.config import EngineConfig
from baton.engine.plan import Key
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.kvcache.hashing import root_hash
from baton.protocol.errors import Code, RequestError
from baton.protocol.sequence import SequenceState


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for one sequence on its way: never pre-empted, never in the prefix index."""

    key: Key
    tokens: list[int]  # the known tokens it was made for
    salt: str
    priority: int
    order: int
    root: int
    hashes: list[int]
    blocks: list[int]  # the whole table: hits, slots, and room for the next token
    hit_blocks: int  # leading blocks that are here already, pinned

    slots: list[int]  # to pull into: those of blocks hit_blocks, hit_blocks + 1, ... that `tokens` reach


class Receiving:
    """Reservations over an engine's pool and scheduler."""

    def __init__(self, config: EngineConfig, pool: BlockPool, scheduler: Scheduler) -> None:
        self.config = config
        self.pool = pool
        self.scheduler = scheduler
        self.open: dict[Key, Reservation] = {}

    def reserve(
        self,
        key: Key,
        tokens: list[int],
        salt: str,
        max_new_tokens: int,
        priority: int,
        *,
        order: int,
        preempt: bool,
    ) -> Reservation | None:
        """Room for `tokens` and the one after them, or None: none left beside the watermark, or others wait.

        Raises:
            RequestError: CONTEXT_LENGTH, it can never fit; STALE, there is one for this key.
        """
        if key in self.open:
            raise RequestError.of(Code.STALE, "a hand-off of this attempt is under way already")
        longest = min(len(tokens) + max_new_tokens, self.config.max_context)
        check_fits(max(len(tokens) + 1, longest - 1), self.pool)
        blocked = self.scheduler.blocked
        if blocked is not None and blocked.priority >= priority:
            return None
        size = self.pool.block_size
        root, hashes, hits = root_hash(self.config.fingerprint, salt), list[int](), list[int]()
        if self.config.prefix_cache:
            chains.extend(hashes, root, tokens, size)
            hits = self.pool.match(chains.blocks(hashes, root, tokens, salt, 0, len(hashes), size))
        slots = self.scheduler.claim(len(tokens) // size + 1 - len(hits), priority, preempt=preempt)
        if slots is None:
            self.pool.release(hits)
            return None
        self.scheduler.reserved += 1
        table = hits + slots
        made = Reservation(
            key=key,
            tokens=tokens,
            salt=salt,
            priority=priority,
            order=order,
            root=root,
            hashes=hashes,
            blocks=table,
            hit_blocks=len(hits),
            slots=table[len(hits) : -(-len(tokens) // size)],
        )
        self.open[key] = made
        return made

    def admit(self, reservation: Reservation, state: SequenceState, now: float) -> Sequence:
        """Turn a reservation whose blocks have all arrived into a running sequence.

        Raises:
            RequestError: STALE, it was cancelled; TRANSFER_FAILED, the state is of another sequence or needs
                blocks that were not reserved. The reservation stands then; cancel it.
        """
        if self.open.get(reservation.key) is not reservation:
            raise RequestError.of(Code.STALE, "this hand-off has been given up")
        seq = Sequence.from_state(state, now)
        size = self.pool.block_size
        pulled = reservation.hit_blocks + len(reservation.slots)
        if (
            seq.key[:2] != reservation.key[:2]  # whichever choice it is, the offer did not say
            or seq.salt != reservation.salt
            or seq.tokens[: len(reservation.tokens)] != reservation.tokens
        ):
            raise RequestError.of(Code.TRANSFER_FAILED, "the committed sequence is not the one offered")
        if not reservation.hit_blocks * size <= state.computed <= min(seq.known - 1, pulled * size):
            raise RequestError.of(
                Code.TRANSFER_FAILED,
                f"{state.computed} tokens computed of {seq.known} known, in {pulled} blocks of {size}",
            )
        check_new(seq, self.config)
        check_fits(seq.max_len - 1, self.pool)
        del self.open[reservation.key]
        self.scheduler.reserved -= 1
        seq.order, seq.root, seq.hashes = reservation.order, reservation.root, reservation.hashes
        seq.blocks, seq.computed = reservation.blocks, state.computed
        if self.config.prefix_cache:
            full = state.computed // size
            chains.extend(seq.hashes, seq.root, seq.tokens, size)
            first = reservation.hit_blocks
            content = chains.blocks(seq.hashes, seq.root, seq.tokens, seq.salt, first, full, size)
            for slot, block in zip(seq.blocks[first:full], content, strict=True):
                self.pool.register(slot, block)
        seq.announced = state.computed // size
        self.scheduler.start(seq)
        return seq

    def cancel(self, reservation: Reservation) -> None:
        """Give the room back. Only once nothing writes into its slots any more. Idempotent."""
        if self.open.get(reservation.key) is reservation:
            del self.open[reservation.key]
            self.scheduler.reserved -= 1
            self.pool.release(reservation.blocks)
