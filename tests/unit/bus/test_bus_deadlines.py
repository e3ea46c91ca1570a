"""Deadlines travel as time remaining, so that clocks need not agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.bus.deadlines import LONGEST_MS, deadline, remaining_ms


@given(st.integers(0, LONGEST_MS), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 100))
def test_it_survives_the_way_between_two_clocks_and_never_grows(
    left: int, here: float, there: float, took: float
) -> None:
    mine = deadline(left, here)
    sent = remaining_ms(mine, here + took)
    assert sent <= left
    assert abs(sent - max(0.0, left - took * 1_000)) <= 1.01
    assert abs((deadline(sent, there) - there) - sent / 1_000) < 1e-6


def test_a_hostile_or_late_value_is_bounded() -> None:
    assert deadline(-5, 10.0) == 10.0
    assert deadline(2**62, 10.0) == 10.0 + LONGEST_MS / 1_000
    assert remaining_ms(5.0, 10.0) == 0
    assert remaining_ms(1e12, 0.0) == LONGEST_MS
