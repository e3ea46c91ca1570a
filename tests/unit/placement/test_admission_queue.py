"""The admission queue: order, bounds, deadlines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from placement_rig import place

from baton.placement.queue import AdmissionQueue, Waiting
from baton.protocol.placing import Placement, Target

ANYWHERE = Placement(decode=Target(id="d", epoch=1, subject="s"))


def names(waiting: list[Waiting[str]]) -> list[str]:
    return [entry.place.request for entry in waiting]


def drained(queue: AdmissionQueue[str], fits: set[str] | None = None) -> list[str]:
    """Drains; `fits`: what can be placed, None: all."""

    def attempt(entry: Waiting[str]) -> Placement | None:
        return ANYWHERE if fits is None or entry.place.request in fits else None

    return names([entry for entry, _ in queue.drain(attempt)])


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_higher_classes_first_older_first_within(asked: list[tuple[int, bool]]) -> None:
    queue = AdmissionQueue[str](100)
    expected = []
    for number, (priority, taken_back) in enumerate(asked):
        queue.put(place(f"r{number}", priority=priority), "", 0.0)
        if taken_back:
            queue.remove((f"r{number}", 0))
        else:
            expected.append((-priority, number, f"r{number}"))
    assert len(queue) == len(expected)
    assert drained(queue) == [name for _, _, name in sorted(expected)]
    assert len(queue) == 0


def test_what_lost_its_worker_goes_ahead_of_what_is_new_in_its_class() -> None:
    queue = AdmissionQueue[str](10)
    for name, attempt, priority in (("new", 0, 0), ("again", 3, 0), ("high", 0, 1), ("again too", 1, 0)):
        queue.put(place(name, attempt=attempt, priority=priority), "", 0.0)
    assert drained(queue) == ["high", "again", "again too", "new"]


def test_bounded_and_one_that_waits_may_always_ask_again() -> None:
    queue = AdmissionQueue[str](2)
    assert queue.put(place("a"), "", 0.0) and queue.put(place("b"), "", 0.0)
    assert not queue.put(place("c"), "", 0.0)
    assert queue.put(place("a"), "again", 0.0)
    assert len(queue) == 2


def test_asked_again_the_newest_word_counts_and_the_place_in_the_queue_stays() -> None:
    queue = AdmissionQueue[str](10)
    queue.put(place("a", 100, deadline_ms=1_000), "first", 0.0)
    queue.put(place("b"), "", 1.0)
    queue.put(place("a", 120, deadline_ms=5_000), "second", 2.0)
    assert queue.expired(1.5) == []
    first, second = queue.clear()
    assert (first.reply, first.place.tokens, first.since, first.deadline) == ("second", 120, 0.0, 7.0)
    assert second.place.request == "b"


def test_a_deadline_is_seen_however_many_wait_before_it() -> None:
    queue = AdmissionQueue[str](1_000, patience=4)
    for number in range(100):
        queue.put(place(f"r{number}", deadline_ms=60_000), "", 0.0)
    queue.put(place("late", deadline_ms=500, priority=-1), "", 0.0)
    assert drained(queue, set()) == []
    assert queue.expired(0.49) == []
    assert names(queue.expired(0.5)) == ["late"]
    assert queue.expired(59.9) == []
    assert len(queue.expired(60.0)) == 100 and len(queue) == 0


def test_one_that_does_not_fit_lets_small_ones_pass_within_a_rounds_patience() -> None:
    queue = AdmissionQueue[str](100, patience=3)
    for name in ("big-1", "small-1", "big-2", "small-2", "big-3", "small-3"):
        queue.put(place(name), "", 0.0)
    small = {"small-1", "small-2", "small-3"}
    assert drained(queue, small) == ["small-1", "small-2"]  # the third failure ends the round
    assert drained(queue, {"big-1", "big-2", "big-3"}) == ["big-1", "big-2", "big-3"]
    assert drained(queue, small) == ["small-3"]


def test_a_class_and_its_order_survive_what_is_removed_from_it() -> None:
    queue = AdmissionQueue[str](100)
    for name in "abcd":
        queue.put(place(name), "", 0.0)
    assert queue.remove(("b", 0)) is not None
    assert queue.remove(("b", 0)) is None
    queue.put(place("b"), "", 0.0)  # comes back at the end
    assert drained(queue) == ["a", "c", "d", "b"]
