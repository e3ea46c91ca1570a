"""The expected wait of a queue, from how fast it was emptied."""

from __future__ import annotations

from baton.placement.backlog import Backlog


def test_nothing_waits_nothing_is_expected() -> None:
    backlog = Backlog()
    backlog.placed(1.0)
    assert backlog.wait_s(0, 2.0) == 0.0


def test_a_rate_makes_a_wait() -> None:
    backlog = Backlog()
    assert backlog.wait_s(10, 0.0) == 0.0
    for tenth in range(40):  # ten a second for four seconds
        backlog.placed(tenth / 10)
    assert 0.9 < backlog.wait_s(10, 4.0) < 1.1
    assert 9.0 < backlog.wait_s(100, 4.0) < 11.0


def test_an_old_rate_is_forgotten() -> None:
    backlog = Backlog()
    backlog.wait_s(1, 0.0)
    for at in range(100):
        backlog.placed(at / 100)
    assert backlog.wait_s(10, 7.0) == 7.0  # nothing has moved for longer than the window


def test_a_queue_that_has_only_begun_is_not_judged() -> None:
    backlog = Backlog()
    assert backlog.wait_s(1_000, 10.0) == 0.0
    assert backlog.wait_s(1_000, 10.9) == 0.0
    assert backlog.wait_s(1_000, 12.0) == 2.0


def test_an_idle_time_in_between_begins_anew() -> None:
    backlog = Backlog()
    backlog.wait_s(5, 0.0)
    assert backlog.wait_s(5, 3.0) == 3.0
    backlog.empty()
    assert backlog.wait_s(5, 4.0) == 0.0
