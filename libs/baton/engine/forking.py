"""The choices of one prompt: read once, then sequences of their own over the same blocks.

    parent  [ full ][ full ][ full ][ part | first token ...
    fork    [ same ][ same ][ same ][ copy ]
                                       ^ computes the prompt's last token again, for its logits

The blocks before the one with the prompt's last token are shared by reference: all of them are full, and none
is written again. That last one, which each sequence goes on to write, is copied.
"""

from __future__ import annotations

import msgspec

from baton.engine.block_pool import BlockPool
from baton.engine.progress import Forked
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.protocol.sequence import Fork


def child(parent: Sequence, fork: Fork) -> Sequence:
    """A choice as it begins: its parent's prompt and nothing else."""
    return Sequence(
        request=fork.request,
        attempt=fork.attempt,
        tokens=parent.tokens[: parent.prompt_len],
        prompt_len=parent.prompt_len,
        sampling=parent.sampling,
        choice=fork.choice,
        priority=parent.priority,
        salt=parent.salt,
        reply_to=parent.reply_to,
        prefill_only=parent.prefill_only,
        arrived=parent.arrived,
        deadline=parent.deadline,
        cached_tokens=parent.cached_tokens,
        timing=msgspec.structs.replace(parent.timing),
        scored=parent.scored,
    )


def share(seq: Sequence, parent: Sequence, scheduler: Scheduler, pool: BlockPool) -> Forked | None:
    """Give a child its parent's blocks, ready to run; None if there is no room, or others wait for it.

    The parent's prompt is computed, and it still holds its blocks.
    """
    blocked = scheduler.blocked
    if blocked is not None and blocked.priority >= seq.priority:
        return None
    slots = scheduler.claim(1, seq.priority, preempt=False)
    if slots is None:
        return None
    reach = seq.prompt_len - 1  # its K and V are taken over, those of the last token are made anew
    shared, rest = divmod(reach, pool.block_size)
    pool.pin(parent.blocks[:shared])
    seq.blocks = parent.blocks[:shared] + slots
    seq.computed, seq.announced = reach, shared
    seq.root, seq.hashes = parent.root, parent.hashes[: seq.prompt_len // pool.block_size]
    seq.max_len = parent.max_len
    return Forked(seq, (parent.blocks[shared], slots[0]) if rest else None)
