"""Who counts as alive, from heartbeats alone."""

from __future__ import annotations

from baton.bus.roster import LIMIT, Roster
from baton.protocol.liveness import Heartbeat, Role, State


def beat(instance: str = "d1", epoch: int = 1, seq: int = 1, **fields: object) -> Heartbeat:
    defaults: dict[str, object] = {"role": Role.DECODE, "state": State.READY}
    return Heartbeat(id=instance, epoch=epoch, seq=seq, **(defaults | fields))  # type: ignore[arg-type]


def live(roster: Roster, now: float = 0.0, *, ready: bool = True) -> list[tuple[str, int]]:
    return [(one.id, one.epoch) for one in roster.live(Role.DECODE, now, ready=ready)]


def test_it_joins_then_is_updated() -> None:
    roster = Roster()
    assert [kind for _, kind in roster.heard(beat(), 0.0)] == ["joined"]
    newer = beat(seq=2, note="busy")
    assert roster.heard(newer, 1.0) == [(newer, "updated")]
    assert roster.get("d1", 1.0) == newer


def test_what_was_overtaken_changes_nothing() -> None:
    roster = Roster()
    roster.heard(beat(epoch=2, seq=5), 0.0)
    for old in (beat(epoch=2, seq=5), beat(epoch=2, seq=4), beat(epoch=1, seq=9)):
        assert roster.heard(old, 1.0) == []
    assert roster.heard(beat(epoch=1, seq=10, state=State.STOPPED), 1.0) == []
    assert live(roster) == [("d1", 2)]


def test_three_missed_intervals_end_it() -> None:
    roster = Roster()
    roster.heard(beat(interval_ms=100), 0.0)
    assert roster.expire(0.29) == []
    assert live(roster, 0.29) == [("d1", 1)]
    assert live(roster, 0.31) == []
    assert roster.get("d1", 0.31) is None
    assert [kind for _, kind in roster.expire(0.31)] == ["left"]
    assert [kind for _, kind in roster.heard(beat(seq=2), 0.4)] == ["joined"]


def test_an_absurd_interval_is_bounded() -> None:
    roster = Roster()
    roster.heard(beat("slow", interval_ms=10**9), 0.0)
    roster.heard(beat("hasty", interval_ms=-1), 0.0)
    assert live(roster, 0.05) == [("hasty", 1), ("slow", 1)]
    assert live(roster, 181.0) == []


def test_a_newer_epoch_replaces_the_old_one() -> None:
    roster = Roster()
    old, new = beat(epoch=1, seq=90), beat(epoch=2, seq=1)
    roster.heard(old, 0.0)
    assert roster.heard(new, 0.1) == [(old, "left"), (new, "joined")]
    assert live(roster) == [("d1", 2)]


def test_stopped_is_the_last_word() -> None:
    roster = Roster()
    roster.heard(beat(), 0.0)
    last = beat(seq=2, state=State.STOPPED)
    assert roster.heard(last, 0.1) == [(last, "left")]
    assert live(roster, ready=False) == []
    assert roster.heard(beat("never seen", state=State.STOPPED), 0.1) == []


def test_only_ready_ones_take_work() -> None:
    roster = Roster()
    for instance, state in (("a", State.STARTING), ("b", State.DRAINING), ("c", State.READY)):
        roster.heard(beat(instance, state=state), 0.0)
    assert live(roster) == [("c", 1)]
    assert live(roster, ready=False) == [("a", 1), ("b", 1), ("c", 1)]


def test_the_one_that_started_first_comes_first() -> None:
    roster = Roster()
    for instance, started_ms in (("a", 30), ("b", 10), ("c", 20)):
        roster.heard(beat(instance, started_ms=started_ms), 0.0)
    roster.heard(beat("p", role=Role.PREFILL, started_ms=0), 0.0)
    assert [instance for instance, _ in live(roster)] == ["b", "c", "a"]


def test_an_excluded_one_comes_back_with_a_heartbeat_sent_after() -> None:
    """The next heartbeat may have been on its way when the call failed; the one after it was not."""
    roster = Roster()
    roster.heard(beat(seq=7), 0.0)
    roster.exclude("d1", epoch=1)
    assert live(roster) == []
    assert roster.get("d1", 0.0) is not None
    roster.heard(beat(seq=8), 0.5)
    assert live(roster, 0.5) == []
    roster.heard(beat(seq=9), 1.0)
    assert live(roster, 1.0) == [("d1", 1)]


def test_an_exclusion_is_of_one_epoch() -> None:
    roster = Roster()
    roster.heard(beat(epoch=2), 0.0)
    roster.exclude("d1", epoch=1)
    roster.exclude("unknown", epoch=1)
    assert live(roster) == [("d1", 2)]
    roster.exclude("d1", epoch=2)
    roster.heard(beat(epoch=3, seq=1), 0.1)
    assert live(roster, 0.1) == [("d1", 3)]


def test_after_a_silence_of_our_own_everybody_has_their_full_time() -> None:
    roster = Roster()
    roster.heard(beat(interval_ms=1_000), 0.0)
    roster.forgive(2.9)
    assert live(roster, 5.8) == [("d1", 1)]
    assert live(roster, 5.95) == []


def test_it_is_bounded() -> None:
    roster = Roster()
    for number in range(LIMIT + 3):
        roster.heard(beat(f"w{number}"), 0.0)
    assert (len(live(roster)), roster.refused) == (LIMIT, 3)
    assert [kind for _, kind in roster.heard(beat("w0", epoch=2), 0.0)] == ["left", "joined"]
