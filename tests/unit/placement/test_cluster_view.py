"""The load view: heartbeats plus what they do not know yet, and never more than that."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from placement_rig import Rig, beat, info

from baton.placement.view import (
    UNACKNOWLEDGED_S,
    Assignment,
    ClusterView,
    Key,
    WorkerView,
)
from baton.protocol.liveness import Load, Role, State


def figures(view: WorkerView) -> tuple[int, int, int]:
    return view.sequences, view.queued_tokens, view.blocks_total - view.blocks_free


def assignment(tokens: int = 100, blocks: int = 7, *, at: float = 0.0, decodes: bool = True) -> Assignment:
    return Assignment(tokens, blocks, at + UNACKNOWLEDGED_S, decodes)


def only(cluster: ClusterView) -> WorkerView:
    (view,) = cluster.workers.values()
    return view


def test_an_assignment_weighs_until_a_heartbeat_names_it() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    view = only(cluster)
    cluster.assign(view, ("r", 0), assignment())
    assert figures(view) == (1, 100, 7)
    cluster.heard(beat("d", seq=2))  # sent before it arrived there
    assert figures(view) == (1, 100, 7)
    shown = Load(running=1, blocks_used=7, waiting_tokens=60, placements=[("r", 0)])
    cluster.heard(beat("d", seq=3, load=shown))
    assert figures(view) == (1, 60, 7)
    cluster.heard(beat("d", seq=4))
    assert figures(view) == (0, 0, 0)


def test_a_placement_that_is_over_frees_its_share_at_once_acknowledged_or_not() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    view = only(cluster)
    cluster.assign(view, ("r", 0), assignment())
    cluster.placed(("r", 0))
    assert figures(view) == (0, 0, 0)

    cluster.assign(view, ("s", 0), assignment())
    cluster.heard(beat("d", seq=2, load=Load(running=1, blocks_used=7, placements=[("s", 0)])))
    cluster.placed(("s", 0))
    assert figures(view) == (0, 0, 0)
    cluster.placed(("s", 0))  # told twice: freed once
    assert figures(view) == (0, 0, 0)
    cluster.heard(beat("d", seq=3, load=Load(running=1, blocks_used=7)))  # the worker's word counts
    assert figures(view) == (1, 0, 7)


def test_a_prefill_leg_that_ended_before_the_request_frees_nothing_twice() -> None:
    cluster = ClusterView()
    cluster.heard(beat("p", Role.PREFILL))
    view = only(cluster)
    cluster.assign(view, ("r", 0), assignment(decodes=False))
    cluster.heard(beat("p", Role.PREFILL, seq=2, load=Load(running=1, blocks_used=3, placements=[("r", 0)])))
    cluster.placed(("r", 0))
    assert figures(view) == (1, 0, 3)


def test_choices_of_a_prompt_weigh_as_many() -> None:
    rig = Rig(beat("d", worker=info(100, slots=4)), beat("p", Role.PREFILL))
    assert rig.ask("r", 100, choices=5) is not None
    decode = next(view for view in rig.view.workers.values() if view.role is Role.DECODE)
    assert figures(decode) == (5, 0, 11)  # seven blocks that they share, and one more for each other choice
    assert rig.ask("s", 100) is None  # no place is left
    load = Load(running=5, blocks_used=11, placements=[("r", 0)])
    rig.view.heard(beat("d", seq=2, load=load, worker=info(100, slots=4)))
    rig.view.placed(("r", 0))  # the first of them has ended
    assert figures(decode) == (4, 0, 11)


def test_an_assignment_that_never_arrives_expires() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    view = only(cluster)
    cluster.assign(view, ("r", 0), assignment(at=10.0))
    cluster.expire(10.0 + UNACKNOWLEDGED_S - 0.01)
    assert cluster.outstanding and figures(view) == (1, 100, 7)
    cluster.expire(10.0 + UNACKNOWLEDGED_S)
    assert not cluster.outstanding and figures(view) == (0, 0, 0)


def test_what_has_arrived_weighs_however_long_it_runs() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    view = only(cluster)
    cluster.assign(view, ("r", 0), assignment(at=10.0))
    cluster.heard(beat("d", seq=2, load=Load(running=1, placements=[("r", 0)])))
    before = figures(view)
    cluster.expire(10.0 + 86_400)
    assert figures(view) == before and ("r", 0) in view.taken


def test_the_same_placement_assigned_again_weighs_once() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    view = only(cluster)
    cluster.assign(view, ("r", 0), assignment())
    cluster.assign(view, ("r", 0), assignment(50, 4))
    assert figures(view) == (1, 50, 4)


def test_a_newer_epoch_starts_empty_and_an_older_ones_end_does_not_touch_it() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    cluster.assign(only(cluster), ("r", 0), assignment())
    cluster.heard(beat("d", epoch=2))
    assert figures(only(cluster)) == (0, 0, 0)
    cluster.left("d", 1)
    assert only(cluster).key == ("d", 2)
    cluster.left("d", 2)
    assert not cluster.workers


def test_only_ready_workers_of_the_role_are_offered() -> None:
    cluster = ClusterView()
    for state in State:
        cluster.heard(beat(f"d-{state}", state=state))
    cluster.heard(beat("p", Role.PREFILL))
    assert [view.beat.id for view in cluster.ready(Role.DECODE)] == ["d-ready"]
    assert [view.beat.id for view in cluster.ready(Role.PREFILL)] == ["p"]


def test_excluded_until_a_heartbeat_that_was_sent_afterwards() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d", seq=5))
    cluster.exclude("d", 1)
    assert not cluster.ready(Role.DECODE)
    cluster.heard(beat("d", seq=6))  # was on its way
    assert not cluster.ready(Role.DECODE)
    cluster.heard(beat("d", seq=7))
    assert cluster.ready(Role.DECODE)
    cluster.exclude("d", 0)  # an epoch that is gone
    assert cluster.ready(Role.DECODE)


keys = st.tuples(st.sampled_from("abcdef"), st.integers(0, 1))
events = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), keys, st.integers(0, 500)),
        st.tuples(st.just("arrive"), keys, st.just(0)),
        st.tuples(st.just("over"), keys, st.just(0)),
        st.tuples(st.just("beat"), st.just(("", 0)), st.just(0)),
        st.tuples(st.just("wait"), st.just(("", 0)), st.integers(0, 4)),
    ),
    max_size=60,
)


@given(events)
def test_an_idle_cluster_looks_idle_whatever_happened_before(steps: list[tuple[str, Key, int]]) -> None:
    """A worker that takes what arrives, tells of it in its next heartbeat, and drops what is over."""
    cluster, now, seq = ClusterView(), 0.0, 1
    cluster.heard(beat("d", worker=info(10_000)))
    view = only(cluster)
    holds: set[Key] = set()
    untold: list[Key] = []

    def tell() -> None:
        nonlocal seq
        seq += 1
        load = Load(running=len(holds), blocks_used=len(holds), placements=list(untold))
        untold.clear()
        cluster.heard(beat("d", seq=seq, load=load, worker=info(10_000)))

    for kind, key, number in steps:
        if kind == "assign":
            cluster.assign(view, key, assignment(number, 1 + number % 9, at=now))
        elif kind == "arrive" and key in view.assigned:
            holds.add(key)
            untold.append(key)
        elif kind == "over":
            holds.discard(key)
            cluster.placed(key)
        elif kind == "beat":
            tell()
        elif kind == "wait":
            now += number
            cluster.expire(now)
        known = view.assigned.values()
        assert view.queued_tokens == sum(entry.compute_tokens for entry in known)
        assert view.sequences >= len(known) and view.blocks_free <= view.blocks_total
    holds.clear()
    tell()
    cluster.expire(now + UNACKNOWLEDGED_S)
    assert figures(view) == (0, 0, 0) and not cluster.outstanding


def test_ends_nobody_told_of_are_forgotten_with_the_sequences() -> None:
    cluster = ClusterView()
    cluster.heard(beat("d"))
    view = only(cluster)
    for number in range(3):
        cluster.assign(view, (f"r{number}", 0), assignment())
    told: Any = [(f"r{number}", 0) for number in range(3)]
    cluster.heard(beat("d", seq=2, load=Load(running=3, blocks_used=21, placements=told)))
    cluster.heard(beat("d", seq=3, load=Load(running=1, blocks_used=7)))
    for key in told:
        cluster.placed(key)
    assert figures(view) == (0, 0, 0)  # one was counted, one is taken off
