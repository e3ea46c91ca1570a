"""Filters and scorers: each one tiny, each in plain words. A score is a cost in tokens; the lowest wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.placement.index import Worker
from baton.placement.view import WorkerView

# A running sequence slows each step of its neighbours about as much as prefilling these many tokens once.
SEQUENCE_TOKENS = 64
# Pulling a token's KV costs about this share of computing it.
PULL_SHARE = 0.05
# A prefill worker is given at most about this many steps of work ahead.
QUEUE_STEPS = 16
# Below this share of free blocks, pre-emption is near.
TIGHT = 0.1


@dataclass(slots=True)
class Ask:
    """What a placement needs."""

    tokens: int
    max_new_tokens: int
    fingerprint: str
    hits: dict[Worker, int]  # leading blocks held, by worker
    avoid: frozenset[Worker]

    def hit_tokens(self, view: WorkerView) -> int:
        """Prompt tokens that need no computing there; at least the last one always does."""
        return max(0, min(self.hits.get(view.key, 0) * view.block_size, self.tokens - 1))

    def blocks(self, view: WorkerView) -> int:
        """Blocks for all known tokens and the next one."""
        return -(-(self.tokens + 1) // view.block_size)


def same_fingerprint(ask: Ask, view: WorkerView) -> bool:
    return view.fingerprint == ask.fingerprint


def not_avoided(ask: Ask, view: WorkerView) -> bool:
    return view.key not in ask.avoid


def has_room(ask: Ask, view: WorkerView) -> bool:
    """Free blocks for what is not there yet; cached blocks of others count as free."""
    return view.blocks_free >= ask.blocks(view) - ask.hit_tokens(view) // view.block_size


def has_slot(ask: Ask, view: WorkerView) -> bool:
    """A place in its steps: it decodes no more sequences than fit in one."""
    info = view.beat.worker
    return info is None or not info.max_sequences or view.sequences < info.max_sequences


def short_queue(ask: Ask, view: WorkerView) -> bool:
    """Little enough to prefill ahead; else the request waits here, where it can still go elsewhere."""
    info = view.beat.worker
    if info is None or not info.max_batch_tokens:
        return True
    return view.queued_tokens < QUEUE_STEPS * info.max_batch_tokens


def queued(ask: Ask, view: WorkerView) -> float:
    """Tokens to prefill ahead of it."""
    return view.queued_tokens


def uncached(ask: Ask, view: WorkerView) -> float:
    """Tokens to prefill for it."""
    return ask.tokens - ask.hit_tokens(view)


def pulled(ask: Ask, view: WorkerView) -> float:
    """Tokens whose KV must come from elsewhere."""
    return PULL_SHARE * (ask.tokens - ask.hit_tokens(view))


def neighbours(ask: Ask, view: WorkerView) -> float:
    """Sequences that share its steps."""
    return SEQUENCE_TOKENS * view.sequences


def pressure(ask: Ask, view: WorkerView) -> float:
    """Grows when free blocks get scarce, so that none is pre-empted while another worker has room."""
    after = (view.blocks_free - ask.blocks(view)) / max(1, view.blocks_total)
    return 0.0 if after >= TIGHT else (TIGHT - after) / TIGHT * 4 * SEQUENCE_TOKENS


Filter = Callable[[Ask, WorkerView], bool]
Scorer = Callable[[Ask, WorkerView], float]

FITS: tuple[Filter, ...] = (same_fingerprint, not_avoided, has_room)
PREFILL_FILTERS = (*FITS, short_queue)
DECODE_FILTERS = (*FITS, has_slot)
PREFILL: tuple[Scorer, ...] = (queued, uncached)
DECODE: tuple[Scorer, ...] = (queued, neighbours, pulled, pressure)


def pick(
    ask: Ask, views: list[WorkerView], filters: tuple[Filter, ...], scorers: tuple[Scorer, ...]
) -> tuple[WorkerView | None, str]:
    """The cheapest worker that passes the filters, and why, in one line. Ties go to the fewest sequences."""
    left = [view for view in views if all(passes(ask, view) for passes in filters)]
    if not left:
        return None, "none has room"
    costs = {view.beat.id: [scorer(ask, view) for scorer in scorers] for view in left}
    best = min(left, key=lambda view: (sum(costs[view.beat.id]), view.sequences, view.beat.id))
    parts = zip(scorers, costs[best.beat.id], strict=True)
    detail = ", ".join(f"{scorer.__name__} {cost:.0f}" for scorer, cost in parts)
    return best, f"{best.beat.id} of {len(left)} ({detail})"
