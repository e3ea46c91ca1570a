"""Filters and scorers: each one tiny, each in plain words. A score is a cost in tokens; the lowest wins.

Each takes what is asked, a worker, and how many prompt tokens need no computing there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.placement.index import Worker
from baton.placement.view import WorkerView
from baton.protocol.placing import BACKGROUND

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
    fingerprint: str
    hits: dict[Worker, int]  # leading blocks held, by worker
    avoid: frozenset[Worker]
    priority: int = 0

    def hit_tokens(self, view: WorkerView) -> int:
        """Prompt tokens that need no computing there; at least the last one always does."""
        blocks = self.hits.get(view.key)
        return min(blocks * view.block_size, self.tokens - 1) if blocks else 0

    def blocks(self, view: WorkerView) -> int:
        """Blocks for all known tokens and the next one."""
        return -(-(self.tokens + 1) // view.block_size)


def same_fingerprint(ask: Ask, view: WorkerView, hit: int) -> bool:
    return view.fingerprint == ask.fingerprint


def not_avoided(ask: Ask, view: WorkerView, hit: int) -> bool:
    return view.key not in ask.avoid


def has_room(ask: Ask, view: WorkerView, hit: int) -> bool:
    """Free blocks for what is not there yet; cached ones of others count as free, as do lower classes'."""
    needed = -(-(ask.tokens + 1) // view.block_size) - hit // view.block_size
    return view.blocks_free >= needed or view.blocks_free + view.below(ask.priority)[1] >= needed


def has_slot(ask: Ask, view: WorkerView, hit: int) -> bool:
    """A place in its steps: it decodes no more than fit in one, but a higher class takes a lower one's."""
    if not view.max_sequences or view.sequences < view.max_sequences:
        return True
    return view.sequences - view.below(ask.priority)[0] < view.max_sequences


def short_queue(ask: Ask, view: WorkerView, hit: int) -> bool:
    """Little enough to prefill ahead; else the request waits here, where it can still go elsewhere.

    What runs in the background leaves half of the queue to the rest, which overtakes it there.
    """
    steps = QUEUE_STEPS // 2 if ask.priority <= BACKGROUND else QUEUE_STEPS
    return not view.max_batch_tokens or view.queued_tokens < steps * view.max_batch_tokens


def queued(ask: Ask, view: WorkerView, hit: int) -> float:
    """Tokens to prefill ahead of it."""
    return view.queued_tokens


def uncached(ask: Ask, view: WorkerView, hit: int) -> float:
    """Tokens to prefill for it."""
    return ask.tokens - hit


def pulled(ask: Ask, view: WorkerView, hit: int) -> float:
    """Tokens whose KV must come from elsewhere."""
    return PULL_SHARE * (ask.tokens - hit)


def neighbours(ask: Ask, view: WorkerView, hit: int) -> float:
    """Sequences that share its steps."""
    return SEQUENCE_TOKENS * view.sequences


def pressure(ask: Ask, view: WorkerView, hit: int) -> float:
    """Grows when free blocks get scarce, so that none is pre-empted while another worker has room."""
    after = (view.blocks_free - ask.blocks(view)) / (view.blocks_total or 1)
    return 0.0 if after >= TIGHT else (TIGHT - after) / TIGHT * 4 * SEQUENCE_TOKENS


Filter = Callable[[Ask, WorkerView, int], bool]
Scorer = Callable[[Ask, WorkerView, int], float]

FITS: tuple[Filter, ...] = (same_fingerprint, not_avoided, has_room)
PREFILL_FILTERS = (*FITS, short_queue)
DECODE_FILTERS = (*FITS, has_slot)
PREFILL: tuple[Scorer, ...] = (queued, uncached)
DECODE: tuple[Scorer, ...] = (queued, neighbours, pulled, pressure)


def pick(
    ask: Ask, views: list[WorkerView], filters: tuple[Filter, ...], scorers: tuple[Scorer, ...]
) -> tuple[WorkerView | None, str]:
    """The cheapest worker that passes the filters, and why, in one line.

    Among equals: the fewest sequences, then the one chosen longest ago.
    """
    best: WorkerView | None = None
    best_rank: tuple[float, int, int] = (0.0, 0, 0)
    left = 0
    hits, most = ask.hits, ask.tokens - 1
    if not ask.avoid:
        filters = tuple(passes for passes in filters if passes is not not_avoided)
    for view in views:
        blocks = hits.get(view.key)
        hit = min(blocks * view.block_size, most) if blocks else 0
        for passes in filters:
            if not passes(ask, view, hit):
                break
        else:
            left += 1
            cost = 0.0
            for scorer in scorers:
                cost += scorer(ask, view, hit)
            rank = (cost, view.sequences, view.turn)
            if best is None or rank < best_rank:
                best, best_rank = view, rank
    if best is None:
        return None, "none has room"
    hit = ask.hit_tokens(best)
    detail = ", ".join(f"{scorer.__name__} {scorer(ask, best, hit):.0f}" for scorer in scorers)
    return best, f"{best.beat.id} of {left} ({detail})"
