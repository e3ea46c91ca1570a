"""What was cancelled stays refused for a minute, and the memory of it is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.bus.tombstones import KEEP_S, Tombstones


def test_a_cancel_covers_its_attempt_and_lower_ones() -> None:
    stones = Tombstones()
    stones.add("r", 2, now=0.0)
    assert [stones.refuses("r", attempt, 1.0) for attempt in (0, 1, 2, 3)] == [True, True, True, False]
    assert not stones.refuses("other", 0, 1.0)


def test_a_lower_cancel_does_not_weaken_a_higher_one() -> None:
    stones = Tombstones()
    stones.add("r", 5, now=0.0)
    stones.add("r", 1, now=1.0)
    assert stones.refuses("r", 5, 2.0)


def test_it_lasts_sixty_seconds_from_the_last_cancel() -> None:
    stones = Tombstones()
    stones.add("r", 0, now=0.0)
    stones.add("r", 0, now=30.0)
    assert KEEP_S == 60.0
    assert stones.refuses("r", 0, 89.9)
    assert not stones.refuses("r", 0, 90.0)
    assert len(stones) == 0


def test_the_oldest_goes_when_there_are_too_many() -> None:
    stones = Tombstones(limit=2)
    for now, request in enumerate(("a", "b", "a", "c")):
        stones.add(request, 0, float(now))
    assert [stones.refuses(request, 0, 4.0) for request in ("a", "b", "c")] == [True, False, True]
    assert (len(stones), stones.evicted) == (2, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.floats(0, 40)), max_size=30))
def test_it_agrees_with_a_plain_list_of_cancels(cancels: list[tuple[str, int, float]]) -> None:
    stones = Tombstones(keep_s=60.0)
    now, plain = 0.0, dict.fromkeys("abc", (-1, 0.0))
    for request, attempt, pause in cancels:
        now += pause
        stones.add(request, attempt, now)
        level, until = plain[request]
        plain[request] = (max(attempt, level) if until > now else attempt, now + 60.0)
        for name, (level, until) in plain.items():
            expected = [attempt <= level and until > now for attempt in range(5)]
            assert [stones.refuses(name, attempt, now) for attempt in range(5)] == expected
