"""One placement: filter, score, pick a decode worker, and a prefill worker unless the rest is cheap there."""

from __future__ import annotations

from baton.placement import score
from baton.placement.index import PrefixIndex
from baton.placement.score import Ask
from baton.placement.view import Assignment, ClusterView, Key, WorkerView
from baton.protocol.base import unpack_hashes
from baton.protocol.liveness import Role
from baton.protocol.placing import Place, Placement, Target


class Placer:
    """Answers "where" from the index and the view. A placement is a hint: the worker decides hits."""

    def __init__(self, index: PrefixIndex, view: ClusterView, *, local_prefill_tokens: int) -> None:
        """Args: local_prefill_tokens: uncached prompts up to this long are prefilled where they decode."""
        self._index = index
        self._view = view
        self._local = local_prefill_tokens

    def place(self, place: Place, now: float) -> Placement | None:
        """A placement, booked on its workers; None while no worker has room."""
        ask = Ask(
            tokens=place.tokens,
            max_new_tokens=place.max_new_tokens,
            fingerprint=place.fingerprint,
            hits=self._index.hits(unpack_hashes(place.hashes).tolist()),
            avoid=frozenset((worker, epoch) for worker, epoch in place.avoid),
        )
        key = (place.request, place.attempt)
        self._view.placed(key)  # asked again: not booked twice
        decode_views, prefill_views = self._view.ready(Role.DECODE), self._view.ready(Role.PREFILL)
        # A role that has no worker left is served by the other one.
        decode, why = score.pick(ask, decode_views or prefill_views, score.DECODE_FILTERS, score.DECODE)
        if decode is None and ask.avoid:  # all others were tried: rather one of those again than none
            ask.avoid = frozenset()
            decode, why = score.pick(ask, decode_views or prefill_views, score.DECODE_FILTERS, score.DECODE)
        if decode is None:
            return None
        if not decode_views or self._cheap(ask, decode):
            self._book(decode, key, ask.tokens - ask.hit_tokens(decode), ask.blocks(decode), now)
            return self._answer(ask, decode, None, f"decode and prefill on {why}")
        prefill, why_prefill = score.pick(ask, prefill_views, score.PREFILL_FILTERS, score.PREFILL)
        if prefill is None:
            if prefill_views:
                return None
            self._book(decode, key, ask.tokens - ask.hit_tokens(decode), ask.blocks(decode), now)
            return self._answer(ask, decode, None, f"no prefill worker is left; both on {why}")
        self._book(decode, key, 0, ask.blocks(decode), now)
        self._book(prefill, key, ask.tokens - ask.hit_tokens(prefill), ask.blocks(prefill), now)
        return self._answer(ask, decode, prefill, f"prefill on {why_prefill}; decode on {why}")

    def too_large(self, place: Place) -> int | None:
        """Tokens that the largest pool holds, if `place` needs more; None if it fits somewhere."""
        views = self._view.ready(Role.DECODE) or self._view.ready(Role.PREFILL)
        most = max((view.blocks_total * view.block_size for view in views), default=None)
        return most if most is not None and place.tokens + 1 > most else None

    def _cheap(self, ask: Ask, decode: WorkerView) -> bool:
        return self._local > 0 and ask.tokens - ask.hit_tokens(decode) <= self._local

    def _book(self, view: WorkerView, key: Key, compute: int, blocks: int, now: float) -> None:
        self._view.assign(view, key, Assignment(compute_tokens=compute, blocks=blocks, at=now))

    def _answer(self, ask: Ask, decode: WorkerView, prefill: WorkerView | None, why: str) -> Placement:
        return Placement(
            decode=_target(decode),
            prefill=_target(prefill) if prefill is not None else None,
            prefill_hit_tokens=ask.hit_tokens(prefill) if prefill is not None else 0,
            decode_hit_tokens=ask.hit_tokens(decode),
            why=why,
        )


def _target(view: WorkerView) -> Target:
    return Target(id=view.beat.id, epoch=view.beat.epoch, subject=view.beat.subject)
