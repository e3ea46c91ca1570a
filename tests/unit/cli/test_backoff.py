from __future__ import annotations

from baton.cli.supervisor.backoff import RestartPolicy


def test_a_process_that_worked_is_started_at_once_and_then_with_growing_pauses() -> None:
    policy = RestartPolicy()
    delays = []
    for second in range(8):
        policy.ready(float(second))
        delays.append(policy.died(second + 0.5, "-9 "))
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_ten_seconds_of_health_wipe_the_slate() -> None:
    policy = RestartPolicy()
    for _ in range(4):
        policy.ready(0.0)
        policy.died(1.0, "-9 ")
    policy.ready(10.0)
    assert policy.died(19.9, "-9 ") == 4.0
    policy.ready(50.0)
    assert policy.died(60.0, "-9 ") == 0.0


def test_readiness_counts_from_the_first_heartbeat() -> None:
    policy = RestartPolicy()
    policy.ready(0.0)
    policy.died(1.0, "-9 ")
    policy.ready(2.0)
    policy.ready(11.0)
    assert policy.died(12.5, "-9 ") == 0.0  # 10.5 s since it said ready, not 1.5


def test_the_same_failure_five_times_at_start_is_given_up() -> None:
    policy = RestartPolicy()
    assert [policy.died(float(i), "1 no such file") for i in range(5)] == [0.0, 0.5, 1.0, 2.0, None]


def test_other_reasons_and_a_good_start_begin_the_count_anew() -> None:
    policy = RestartPolicy()
    for i in range(4):
        assert policy.died(float(i), "1 bus away") is not None
    assert policy.died(5.0, "1 model damaged") is not None
    for i in range(3):
        assert policy.died(6.0 + i, "1 model damaged") is not None
    policy.ready(10.0)
    assert policy.died(11.0, "-11 ") is not None
    assert policy.died(12.0, "1 model damaged") is not None
