"""A key's use of the last minute: no minute ever holds more than its limit."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.limits import KeySpent, Settle, Take
from baton_services.gateway.budgets import MINUTE, Budget, Budgets, Window
from baton_services.gateway.limits import duration

STEPS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5)), min_size=1, max_size=60)


def ask(**fields: int) -> Take:
    return Take(key="k", gateway="g", **{"tokens": 0, "running": 1, **fields})


@settings(max_examples=60, deadline=None)
@given(STEPS, st.floats(0, 1))
def test_no_minute_holds_more_than_the_limit(steps: list[tuple[float, int]], start: float) -> None:
    budget, now, taken = Budget(), start, []
    for pause, tokens in steps:
        now += pause
        answer = budget.take(ask(tokens=tokens, tokens_per_minute=10, requests_per_minute=6), now)
        if not answer.refused:
            taken.append((now, tokens))
        else:
            assert answer.wait_ms > 0
            again = budget.take(
                ask(tokens=tokens, tokens_per_minute=10, requests_per_minute=6), now + answer.wait_ms / 1000
            )
            assert not again.refused, "it was told to come back then"
            now += answer.wait_ms / 1000
            taken.append((now, tokens))
    for first, _ in taken:
        within = [tokens for at, tokens in taken if first <= at < first + MINUTE]
        assert sum(within) <= 10 and len(within) <= 6


def test_what_was_taken_comes_back_after_a_minute_and_a_second() -> None:
    window = Window()
    window.add(100.9, 4)
    assert [window.used(at) for at in (100.9, 160.9, 160.999, 161.0)] == [4, 4, 4, 0]
    assert window.wait(110.0, 1, 4) == 0.0  # nothing is left of it: `used` has dropped it
    window.add(200.0, 3)
    window.add(210.0, 1)
    assert window.wait(210.0, 2, 4) == 51.0
    assert window.wait(210.0, 4, 4) == 61.0
    assert window.empty_in(210.0) == 61.0


def test_the_limit_that_holds_for_longest_is_told() -> None:
    budget = Budget()
    limits = {"requests_per_minute": 2, "tokens_per_minute": 100, "concurrent": 2}
    first = budget.take(ask(tokens=10, **limits), 0.0)
    assert (first.refused, first.requests_left, first.tokens_left) == ("", 1, 90)
    second = budget.take(ask(tokens=80, running=2, **limits), 5.0)
    assert (second.refused, second.requests_left, second.tokens_left) == ("", 0, 10)
    third = budget.take(ask(tokens=20, running=1, **limits), 6.0)
    assert (third.refused, third.wait_ms) == ("requests", 55_000)
    assert (third.requests_left, third.tokens_left) == (0, 10)
    assert (third.requests_reset_ms, third.tokens_reset_ms) == (60_000, 60_000)
    busy = Budget()
    for running, refused in ((1, ""), (2, ""), (3, "concurrent")):
        assert busy.take(ask(running=running, concurrent=2), 0.0).refused == refused
    elsewhere = Take(key="k", gateway="other", tokens=0, running=1, concurrent=2)
    assert busy.take(elsewhere, 0.0).refused == "concurrent"
    busy.settle(Settle(key="k", gateway="g", tokens=0, age_ms=0, running=1), 1.0)
    assert busy.take(elsewhere, 1.0).refused == ""


def test_an_estimate_is_put_right() -> None:
    budget = Budget()
    budget.take(ask(tokens=50, tokens_per_minute=60), 10.0)
    budget.settle(Settle(key="k", gateway="g", tokens=-45, age_ms=2_000, running=0), 12.0)
    assert budget.tokens.ages(12.0) == [(2, 5)]
    budget.settle(
        Settle(key="k", gateway="g", tokens=100, age_ms=3_000, running=0), 13.0
    )  # more than the limit
    refused = budget.take(ask(tokens=1, tokens_per_minute=60), 14.0)
    assert (refused.refused, refused.wait_ms, refused.tokens_left) == ("tokens", 60_000, 0)
    budget.settle(Settle(key="k", gateway="g", tokens=-45, age_ms=900_000, running=0), 15.0)  # long forgotten
    assert budget.tokens.used(15.0) == 105


def test_another_gateway_goes_on_with_the_count() -> None:
    here, there = Budgets(), Budgets()
    for now in (0.2, 1.2, 30.2):
        here.take(ask(tokens=7, running=2), now)
    (told,) = here.tell({"k", "unknown"}, 40.7)
    assert told == KeySpent("k", [(40, 1), (39, 1), (10, 1)], [(40, 7), (39, 7), (10, 7)])
    there.adopt(told, 1_000.5, unless_more=False)
    assert there.take(ask(requests_per_minute=3), 1_000.6).refused == "requests"
    assert there.take(ask(requests_per_minute=3), 1_021.5).refused == ""
    there.adopt(KeySpent("k", [], []), 1_022.0, unless_more=True)
    assert there.take(ask(requests_per_minute=2), 1_022.0).refused == "requests"
    there.run("dead", {"k": 5})
    assert there.take(ask(concurrent=5), 1_023.0).refused == "concurrent"
    there.run("dead", {})
    assert there.take(ask(concurrent=5), 1_023.0).refused == ""


def test_what_no_longer_counts_is_forgotten() -> None:
    budgets = Budgets()
    budgets.take(ask(), 0.0)
    budgets.forget(100.0)
    assert budgets.known() == {"k"}  # one still runs
    budgets.settle(Settle(key="k", gateway="g", tokens=0, age_ms=0, running=0), 101.0)
    budgets.forget(102.0)
    assert budgets.known() == set()


def test_spans_of_time_as_openai_writes_them() -> None:
    spans = [0, 7, 999, 1_000, 8_640, 59_999, 60_000, 90_500, 360_000]
    told = ["0ms", "7ms", "999ms", "1s", "8.64s", "59.999s", "1m0s", "1m30.5s", "6m0s"]
    assert list(map(duration, spans)) == told
    assert all(map(str.isascii, itertools.chain(told)))
