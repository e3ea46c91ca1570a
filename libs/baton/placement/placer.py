"""One placement: filter, score, pick a decode worker, and a prefill worker unless the rest is cheap there."""

from __future__ import annotations

from collections.abc import Callable, Collection

from baton.placement import score
from baton.placement.index import PrefixIndex, Worker
from baton.placement.score import Ask, Filter, Scorer
from baton.placement.view import UNACKNOWLEDGED_S, UNOFFERED_S, Assignment, ClusterView, Key, WorkerView
from baton.protocol.base import unpack_hashes
from baton.protocol.liveness import Role
from baton.protocol.placing import Place, Placement, Target

# So long may small requests go first while a large one finds no room.
OVERTAKEN_S = 2.0


class Placer:
    """Answers "where" from the index and the view. A placement is a hint: the worker decides hits."""

    def __init__(self, index: PrefixIndex, view: ClusterView, *, local_prefill_tokens: int) -> None:
        """Args: local_prefill_tokens: uncached prompts up to this long are prefilled where they decode."""
        self._index = index
        self._view = view
        self._local = local_prefill_tokens

    def round(self, now: float) -> Callable[[Place, float], Placement | None]:
        """Places what waits (`place`, since when), in order; None while no worker has room.

        What waits for longer than OVERTAKEN_S is overtaken no more where it will go: small ones would take
        every block that is freed, for as long as they come.
        """
        kept: set[Worker] = set()

        def attempt(place: Place, since: float) -> Placement | None:
            placement = self.place(place, now, kept)
            if placement is None and now - since >= OVERTAKEN_S:
                kept.update(self.promise(place, kept))
            return placement

        return attempt

    def place(self, place: Place, now: float, kept: Collection[Worker] = ()) -> Placement | None:
        """A placement, booked on its workers; None while no worker has room, but those `kept` for others.

        Raises:
            msgspec.ValidationError: the hashes are not whole.
        """
        ask = self._ask(place)
        key = (place.request, place.attempt)
        self._view.placed(key)  # asked again: not booked twice
        decoders, prefillers = self._view.ready(Role.DECODE), self._view.ready(Role.PREFILL)
        # A role that has no worker left is served by the other one.
        decode, why = _pick(ask, _without(decoders or prefillers, kept), score.DECODE_FILTERS, score.DECODE)
        if decode is None:
            return None
        if place.moving:
            self._book(decode, key, ask, now, compute=0, offered=True)
            return _answer(ask, decode, None, f"moves to {why}")
        # A prefill worker where this request failed is no better than none: decode can do it alone.
        prefillers = [view for view in prefillers if view.key not in ask.avoid]
        if not decoders or not prefillers or self._cheap(ask, decode):
            compute = ask.tokens - ask.hit_tokens(decode)
            self._book(decode, key, ask, now, compute=compute, choices=place.choices)
            return _answer(ask, decode, None, f"decode and prefill on {why}")
        prefill, why_prefill = score.pick(
            ask, _without(prefillers, kept), score.PREFILL_FILTERS, score.PREFILL
        )
        if prefill is None:
            return None
        self._book(decode, key, ask, now, compute=0, offered=True, choices=place.choices)
        compute = ask.tokens - ask.hit_tokens(prefill)
        self._book(prefill, key, ask, now, compute=compute, decodes=False)
        return _answer(ask, decode, prefill, f"prefill on {why_prefill}; decode on {why}")

    def promise(self, place: Place, kept: Collection[Worker]) -> list[Worker]:
        """Whom to keep for one that finds no room: of each role that has none, the worker nearest to it."""
        ask, promised = self._ask(place), []
        for role in (Role.DECODE, Role.PREFILL):
            views = [view for view in self._view.ready(role) if view.fingerprint == ask.fingerprint]
            views = _without(views, kept)
            if views and not any(score.has_room(ask, view, ask.hit_tokens(view)) for view in views):
                nearest = max(views, key=lambda view: view.blocks_free + ask.hits.get(view.key, 0))
                promised.append(nearest.key)
        return promised

    def _ask(self, place: Place) -> Ask:
        return Ask(
            tokens=place.tokens,
            fingerprint=place.fingerprint,
            hits=self._index.hits(unpack_hashes(place.hashes).tolist()),
            avoid=frozenset((worker, epoch) for worker, epoch in place.avoid),
            priority=place.priority,
        )

    def too_large(self, place: Place) -> int | None:
        """Tokens that the largest pool holds, if `place` needs more; None if it fits somewhere."""
        views = self._view.ready(Role.DECODE) or self._view.ready(Role.PREFILL)
        most = max((view.blocks_total * view.block_size for view in views), default=None)
        return most if most is not None and place.tokens + 1 > most else None

    def _cheap(self, ask: Ask, decode: WorkerView) -> bool:
        return self._local > 0 and ask.tokens - ask.hit_tokens(decode) <= self._local

    def _book(
        self,
        view: WorkerView,
        key: Key,
        ask: Ask,
        now: float,
        *,
        compute: int,
        offered: bool = False,
        decodes: bool = True,
        choices: int = 1,
    ) -> None:
        expires = now + (UNOFFERED_S if offered else UNACKNOWLEDGED_S)
        blocks = ask.blocks(view) + choices - 1  # they share all but the last one
        self._view.assign(view, key, Assignment(compute, blocks, expires, decodes, choices, ask.priority))


def _without(views: list[WorkerView], kept: Collection[Worker]) -> list[WorkerView]:
    return [view for view in views if view.key not in kept] if kept else views


def _pick(
    ask: Ask, views: list[WorkerView], filters: tuple[Filter, ...], scorers: tuple[Scorer, ...]
) -> tuple[WorkerView | None, str]:
    """As `score.pick`; when all others were tried or are full: rather one of those avoided than none."""
    chosen, why = score.pick(ask, views, filters, scorers)
    if chosen is None and ask.avoid:
        anyone = Ask(ask.tokens, ask.fingerprint, ask.hits, frozenset(), ask.priority)
        chosen, why = score.pick(anyone, views, filters, scorers)
    return chosen, why


def _answer(ask: Ask, decode: WorkerView, prefill: WorkerView | None, why: str) -> Placement:
    return Placement(
        decode=_target(decode),
        prefill=_target(prefill) if prefill is not None else None,
        prefill_hit_tokens=ask.hit_tokens(prefill) if prefill is not None else 0,
        decode_hit_tokens=ask.hit_tokens(decode),
        why=why,
    )


def _target(view: WorkerView) -> Target:
    return Target(id=view.beat.id, epoch=view.beat.epoch, subject=view.beat.subject)
