"""What goes into a step, and who makes way for whom."""

from __future__ import annotations

import pytest
from engine_rig import BLOCK, Rig, text, undisturbed

from baton.engine.plan import StepPlan
from baton.engine.sequence import Status
from baton.protocol.sampling import SamplingParams


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each slice."""
    assert plan is not None
    return [(part.key[0], part.start, len(part.tokens)) for part in plan.slices]


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    rig = Rig(max_batch_tokens=10)
    rig.add("a", text(1, 4))
    assert shape(rig.step()) == [("a", 0, 4)]
    rig.add("b", text(2, 20))
    assert shape(rig.step()) == [("a", 4, 1), ("b", 0, 9)]
    assert shape(rig.step()) == [("a", 5, 1), ("b", 9, 9)]
    assert shape(rig.step()) == [("a", 6, 1), ("b", 18, 2)]
    assert shape(rig.step()) == [("a", 7, 1), ("b", 20, 1)]


def test_only_the_slice_that_reaches_the_end_samples() -> None:
    rig = Rig(max_batch_tokens=8)
    rig.add("a", text(1, 20))
    plans = [rig.step() for _ in range(3)]
    assert [plan.slices[0].sample is not None for plan in plans if plan] == [False, False, True]


def test_several_prompts_share_a_step_in_order_of_arrival() -> None:
    rig = Rig(max_batch_tokens=16)
    for name in "abc":
        rig.add(name, text(ord(name), 7))
    assert shape(rig.step()) == [("a", 0, 7), ("b", 0, 7), ("c", 0, 2)]


def test_higher_classes_go_first() -> None:
    rig = Rig(max_batch_tokens=16)
    rig.add("low", text(1, 40))
    rig.step()
    rig.add("low2", text(2, 8))
    rig.add("high", text(3, 12), priority=1)
    assert shape(rig.step()) == [("high", 0, 12), ("low", 16, 4)]
    assert shape(rig.step()) == [("high", 12, 1), ("low", 20, 15)]


def test_places_are_limited() -> None:
    rig = Rig(max_sequences=2)
    seqs = [rig.add(name, text(ord(name), 3), SamplingParams(max_tokens=3)) for name in "abc"]
    rig.step()
    assert [seq.status for seq in seqs] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    rig.run()
    assert [seq.output for seq in seqs] == [undisturbed(seq) for seq in seqs]


def test_a_higher_class_takes_a_place() -> None:
    rig = Rig(max_sequences=2)
    old, new = rig.add("old", text(1, 9)), rig.add("new", text(2, 9))
    rig.step()
    high = rig.add("high", text(3, 9), priority=1)
    rig.step()
    assert (old.status, new.status, high.status) == (Status.RUNNING, Status.WAITING, Status.RUNNING)
    equal = rig.add("equal", text(4, 9), priority=1)
    rig.step()
    assert (old.status, equal.status) == (Status.WAITING, Status.RUNNING)
    rig.add("third", text(5, 9), priority=1)
    assert {name for name, _, _ in shape(rig.step())} == {"high", "equal"}, "equals are not pre-empted"
    rig.run()
    for seq in (old, new, high, equal):
        assert seq.output == undisturbed(seq)


def test_a_higher_class_takes_blocks_unless_they_would_not_do() -> None:
    rig = Rig(blocks=8)
    low = rig.add("low", text(1, 5 * BLOCK), SamplingParams(max_tokens=20))
    rig.step()
    high = rig.add("high", text(2, 5 * BLOCK), SamplingParams(max_tokens=4), priority=1)
    rig.step()
    assert (low.status, high.status) == (Status.WAITING, Status.RUNNING)
    mid = rig.add("mid", text(3, 6 * BLOCK), SamplingParams(max_tokens=4), priority=0)
    rig.step()
    assert mid.status is Status.WAITING
    rig.run()
    assert [seq.output for seq in (low, high, mid)] == [undisturbed(seq) for seq in (low, high, mid)]


def test_no_pre_emption_in_vain() -> None:
    rig = Rig(blocks=8)
    held = rig.add("held", text(1, 4 * BLOCK), prefill_only=True)
    rig.step()
    assert held.status is Status.HELD
    low = rig.add("low", text(2, BLOCK), SamplingParams(max_tokens=40))
    rig.step()
    rig.add("high", text(3, 5 * BLOCK), priority=1)
    rig.step()
    assert low.status is Status.RUNNING, "with all of low's blocks, high would not fit yet"


def test_the_newest_makes_way_and_comes_back_first() -> None:
    rig = Rig(blocks=8, max_batch_tokens=512)
    params = SamplingParams(max_tokens=30)
    old, new = rig.add("old", text(1, 3 * BLOCK), params), rig.add("new", text(2, 3 * BLOCK), params)
    late = None
    while not new.preemptions:
        rig.step()
        late = late or rig.add("late", text(3, 2), params)
    assert (old.status, new.status) == (Status.RUNNING, Status.WAITING)
    assert rig.engine.scheduler.waiting == [new, late], "ahead of what has never run"
    assert rig.engine.load().waiting_tokens == new.known + 2, "all of it is to be read again"
    rig.run()
    for seq in (old, new, late):
        assert seq is not None and seq.output == undisturbed(seq)
    assert not old.preemptions


def test_what_was_pre_empted_goes_on_from_the_cache() -> None:
    rig = Rig(blocks=20, max_sequences=1)
    low = rig.add("low", text(1, 5 * BLOCK), SamplingParams(max_tokens=12))
    for _ in range(4):
        rig.step()
    rig.add("high", text(2, 3), SamplingParams(max_tokens=2), priority=1)
    rig.step()
    rig.step()
    assert low.status is Status.WAITING
    plan = rig.step()
    assert shape(plan) == [("low", 5 * BLOCK, 4)], "only what no full block holds is computed again"
    assert rig.news[0].new_full_blocks == range(5), "named again: they may lie elsewhere now"
    assert low.cached_tokens == 0, "of its own blocks, not of somebody's prompt"
    rig.run()
    assert low.output == undisturbed(low)


def test_the_watermark_leaves_room_for_who_runs() -> None:
    rig = Rig(blocks=6)
    rig.add("a", text(1, 2 * BLOCK), SamplingParams(max_tokens=20))
    rig.step()
    tight = rig.add("tight", text(2, 4 * BLOCK), SamplingParams(max_tokens=2))
    rig.step()
    assert tight.status is Status.WAITING, "it would take the last block"
    rig.engine.abort("tight", 1)
    fits = rig.add("fits", text(3, 2 * BLOCK), SamplingParams(max_tokens=2))
    rig.step()
    assert fits.status is Status.RUNNING


def test_alone_one_may_take_the_whole_pool() -> None:
    rig = Rig(blocks=6)
    seq = rig.add("all", text(1, 6 * BLOCK - 3), SamplingParams(max_tokens=4))
    rig.run()
    assert seq.output == undisturbed(seq)


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    rig = Rig(blocks=8)
    rig.add("a", text(1, 5 * BLOCK), SamplingParams(max_tokens=12))
    rig.step()
    big, small = rig.add("big", text(2, 6 * BLOCK)), rig.add("small", text(3, 2))
    rig.step()
    assert (big.status, small.status) == (Status.WAITING, Status.WAITING)
    assert rig.engine.reserve(("peer", 1, 0), text(4, 2), "", 4, 0) is None, "nor does a hand-off"
    higher = rig.engine.reserve(("peer", 1, 0), text(4, 2), "", 4, 1)
    assert higher is not None
    rig.engine.cancel_reservation(higher)
    rig.run()
    assert big.output == undisturbed(big) and small.output == undisturbed(small)


def test_a_sequence_without_a_block_pauses_until_one_is_free() -> None:
    rig = Rig(blocks=4)
    held = rig.add("held", text(1, 2 * BLOCK), prefill_only=True)
    rig.step()
    seq = rig.add("seq", text(2, 2 * BLOCK - 1), SamplingParams(max_tokens=4))
    rig.step()
    rig.step()
    assert seq.output_len == 2
    assert rig.step() is None and rig.engine.has_work
    rig.engine.release(held)
    rig.run()
    assert seq.output == undisturbed(seq) and not seq.preemptions


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_smallest_budgets_work(budget: int) -> None:
    rig = Rig(max_batch_tokens=budget)
    seqs = [rig.add(name, text(ord(name), 5), SamplingParams(max_tokens=3)) for name in "abc"]
    rig.run()
    assert [seq.output for seq in seqs] == [undisturbed(seq) for seq in seqs]


def test_abort_of_the_blocked_head_lets_others_in() -> None:
    rig = Rig(blocks=8)
    rig.add("a", text(1, 5 * BLOCK), SamplingParams(max_tokens=12))
    rig.step()
    rig.add("big", text(2, 6 * BLOCK))
    small = rig.add("small", text(3, 2))
    rig.step()
    assert rig.engine.reserve(("peer", 1, 0), [1], "", 4, 0) is None
    rig.engine.abort("big", 1)
    made = rig.engine.reserve(("peer", 1, 0), [1], "", 4, 0)
    assert made is not None
    rig.engine.cancel_reservation(made)
    rig.step()
    assert small.status is Status.RUNNING


def test_the_blocked_head_goes_in_as_soon_as_it_fits() -> None:
    rig = Rig(blocks=10)
    long = rig.add("long", text(1, 2 * BLOCK), SamplingParams(max_tokens=30))
    short = rig.add("short", text(2, 4 * BLOCK), SamplingParams(max_tokens=3))
    rig.step()
    big = rig.add("big", text(3, 5 * BLOCK), SamplingParams(max_tokens=3))
    while short.status is Status.RUNNING:
        assert big.status is Status.WAITING
        rig.step()
    rig.step()
    assert (long.status, big.status) == (Status.RUNNING, Status.RUNNING)


def test_one_that_waits_for_a_place_gets_the_first_that_is_free() -> None:
    rig = Rig(max_sequences=2)
    for name, count in (("long", 3 * BLOCK), ("short", 2)):
        rig.add(name, text(ord(name[0]), BLOCK), SamplingParams(max_tokens=count))
    late = rig.add("late", text(3, 2))
    rig.step()
    rig.step()
    assert late.status is Status.WAITING
    rig.step()
    assert late.status is Status.RUNNING
