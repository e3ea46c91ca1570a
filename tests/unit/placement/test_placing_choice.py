"""Filters, scorers and the choice they make together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_rig import BLOCK, Rig, beat, info, place

from baton.placement import score
from baton.placement.score import Ask
from baton.placement.view import UNACKNOWLEDGED_S, UNOFFERED_S, WorkerView
from baton.protocol.liveness import Load, Role, State
from baton.protocol.placing import BACKGROUND

P, D = Role.PREFILL, Role.DECODE


def ask(tokens: int = 100, *, hits: int = 0, avoid: tuple[str, ...] = ()) -> Ask:
    """For a worker `w` that holds `hits` leading blocks."""
    return Ask(tokens, "fingerprint", {("w", 1): hits} if hits else {}, frozenset((id, 1) for id in avoid))


def worker(load: Load | None = None, *, slots: int = 8, step: int = 256) -> WorkerView:
    return WorkerView(beat("w", load=load, worker=info(slots=slots, step=step)))


def test_at_least_the_last_token_is_computed_and_blocks_include_the_next_token() -> None:
    view = worker()
    assert ask(100, hits=3).hit_tokens(view) == 3 * BLOCK
    assert ask(32, hits=2).hit_tokens(view) == 31
    assert [ask(tokens).blocks(view) for tokens in (1, 15, 16, 31, 32)] == [1, 1, 2, 2, 3]


def test_same_fingerprint() -> None:
    assert score.same_fingerprint(ask(), worker(), 0)
    assert not score.same_fingerprint(ask(), WorkerView(beat("w", worker=info(fingerprint="other"))), 0)


def test_not_avoided() -> None:
    assert score.not_avoided(ask(avoid=("v",)), worker(), 0)
    assert not score.not_avoided(ask(avoid=("v", "w")), worker(), 0)


def test_has_room_counts_what_is_not_there_yet() -> None:
    view = worker(Load(blocks_used=94))  # 6 free; 100 tokens and the next take 7
    assert not score.has_room(ask(100), view, 0)
    assert score.has_room(ask(95), view, 0)
    assert score.has_room(ask(100), view, BLOCK)


def test_has_slot() -> None:
    assert score.has_slot(ask(), worker(Load(running=5, waiting=2)), 0)
    assert not score.has_slot(ask(), worker(Load(running=6, waiting=2)), 0)
    assert score.has_slot(ask(), worker(Load(running=99), slots=0), 0)


def test_short_queue() -> None:
    most = score.QUEUE_STEPS * 256
    assert score.short_queue(ask(), worker(Load(waiting_tokens=most - 1)), 0)
    assert not score.short_queue(ask(), worker(Load(waiting_tokens=most)), 0)
    assert score.short_queue(ask(), worker(Load(waiting_tokens=most), step=0), 0)


def test_scorers() -> None:
    view = worker(Load(running=2, waiting_tokens=70))
    assert score.queued(ask(), view, 0) == 70
    assert score.uncached(ask(100), view, 48) == 52
    assert score.pulled(ask(100), view, 60) == pytest.approx(score.PULL_SHARE * 40)
    assert score.neighbours(ask(), view, 0) == 2 * score.SEQUENCE_TOKENS
    assert score.pressure(ask(), view, 0) == 0
    near, nearer = worker(Load(blocks_used=85)), worker(Load(blocks_used=90))
    assert 0 < score.pressure(ask(), near, 0) < score.pressure(ask(), nearer, 0)


loads = st.lists(
    st.tuples(
        st.integers(0, 9),  # running, of 8
        st.integers(60, 100),  # blocks used, of 100
        st.integers(0, 5_000),  # waiting tokens
        st.sampled_from([State.READY, State.READY, State.READY, State.DRAINING, State.STARTING]),
        st.booleans(),  # avoided
        st.booleans(),  # of our fingerprint
        st.integers(0, 6),  # blocks held
    ),
    min_size=1,
    max_size=8,
)


@given(loads, st.integers(1, 600))
def test_never_one_that_is_unfit_while_a_fit_one_is_there(
    workers: list[tuple[int, int, int, State, bool, bool, int]], tokens: int
) -> None:
    rig = Rig()
    fit, avoided = set(), []
    chain = list(range(1, tokens // BLOCK + 1))
    for number, (running, used, waiting, state, avoid, ours, held) in enumerate(workers):
        id, load = f"d{number}", Load(running=running, blocks_used=used, waiting_tokens=waiting)
        made = info(fingerprint="fingerprint" if ours else "other")
        rig.view.heard(beat(id, load=load, state=state, worker=made))
        rig.index.store((id, 1), chain[:held])
        if avoid:
            avoided.append((id, 1))
        hit = min(min(held, len(chain)) * BLOCK, tokens - 1) // BLOCK
        room = 100 - used >= -(-(tokens + 1) // BLOCK) - hit and running < 8
        if room and ours and state is State.READY:
            fit.add(id)
    chosen = rig.ask("r", tokens, hashes=chain, avoid=avoided)
    preferred = fit - {id for id, _ in avoided}
    if chosen is None:
        assert not fit
    else:
        assert chosen.decode.id in (preferred or fit)
        assert chosen.decode.subject == f"ctl.{chosen.decode.id}" and chosen.prefill is None


def test_prefill_and_decode_each_spread_between_heartbeats() -> None:
    rig = Rig(*(beat(f"p{n}", P) for n in range(4)), *(beat(f"d{n}", D) for n in range(4)))
    chosen = [rig.ask(f"r{number}") for number in range(16)]
    for leg in ("prefill", "decode"):
        ids = [getattr(placement, leg).id for placement in chosen]
        assert sorted(ids) == sorted([f"{leg[0]}{n}" for n in range(4)] * 4)


def test_one_at_a_time_idle_workers_take_turns() -> None:
    rig = Rig(*(beat(f"d{n}", D) for n in range(3)))
    ids = []
    for number in range(6):
        placement = rig.ask(f"r{number}")
        assert placement is not None
        ids.append(placement.decode.id)
        rig.view.placed((f"r{number}", 0))
    assert ids == ["d0", "d1", "d2"] * 2


def test_the_cached_prefix_is_preferred_but_not_on_an_overloaded_worker() -> None:
    chain = list(range(1, 21))
    rig = Rig(beat("p0", P), beat("p1", P), beat("d0"))
    rig.index.store(("p1", 1), chain)
    first = rig.ask("a", 330, hashes=chain)
    assert first is not None and first.prefill is not None
    assert first.prefill.id == "p1" and first.prefill_hit_tokens == 320
    rig.view.heard(beat("p1", P, seq=2, load=Load(waiting_tokens=1_000)))
    second = rig.ask("b", 330, hashes=chain)
    assert second is not None and second.prefill is not None and second.prefill.id == "p0"
    rig.view.heard(beat("p0", P, seq=2, load=Load(waiting_tokens=4_000)))
    third = rig.ask("c", 330, hashes=chain)
    assert third is not None and third.prefill is not None and third.prefill.id == "p1"


def test_short_uncached_rests_are_read_by_the_decode_worker() -> None:
    chain = [1, 2, 3, 4]
    rig = Rig(beat("p", P), beat("d"), local=32)
    short, long = rig.ask("a", 32), rig.ask("b", 33)
    assert short is not None and short.prefill is None
    assert long is not None and long.prefill is not None
    rig.index.store(("d", 1), chain)
    cached = rig.ask("c", 90, hashes=chain)
    assert cached is not None and cached.prefill is None and cached.decode_hit_tokens == 64


def test_each_role_serves_alone_and_a_pair_is_booked_on_both() -> None:
    alone = Rig(beat("p", P)).ask("a")
    assert alone is not None and alone.decode.id == "p" and alone.prefill is None
    alone = Rig(beat("d")).ask("a")
    assert alone is not None and alone.decode.id == "d" and alone.prefill is None
    rig = Rig(beat("p", P), beat("d"))
    rig.ask("a", 100)
    booked = {view.beat.id: (view.sequences, view.queued_tokens) for view in rig.view.workers.values()}
    assert booked == {"p": (1, 100), "d": (1, 0)}
    assert Rig().ask("a") is None
    assert Rig(beat("d", state=State.DRAINING), beat("p", P, state=State.STARTING)).ask("a") is None


def test_asked_again_it_is_booked_once() -> None:
    rig = Rig(beat("p", P), beat("d"))
    rig.ask("a", 100)
    rig.ask("a", 100)
    assert [view.sequences for view in rig.view.workers.values()] == [1, 1]


def test_all_prefill_workers_avoided_decode_does_it_alone() -> None:
    rig = Rig(beat("p", P), beat("d"))
    placement = rig.ask("a", 100, avoid=[("p", 1)])
    assert placement is not None and placement.prefill is None and placement.decode.id == "d"


def test_busy_prefill_workers_are_waited_for() -> None:
    full = Load(waiting_tokens=10_000)
    rig = Rig(beat("p", P, load=full), beat("d"))
    assert rig.ask("a", 100) is None
    assert all(not view.assigned for view in rig.view.workers.values())


def test_a_move_asks_for_a_decode_worker_only() -> None:
    rig = Rig(beat("p", P), beat("d0"), beat("d1"))
    placement = rig.ask("a", 500, avoid=[("d0", 1)], moving=True)
    assert placement is not None and placement.prefill is None and placement.decode.id == "d1"
    assert rig.view.workers["d1"].queued_tokens == 0


def test_a_leg_that_is_offered_to_later_waits_longer_for_its_sign_of_life() -> None:
    rig = Rig(beat("p", P), beat("d"))
    rig.ask("a", 100, now=0.0)
    rig.view.expire(UNACKNOWLEDGED_S)
    assert [view.sequences for view in rig.view.workers.values()] == [0, 1]
    rig.view.expire(UNOFFERED_S)
    assert not rig.view.outstanding


def test_too_large() -> None:
    rig = Rig(beat("d0"), beat("d1", worker=info(200)))
    assert rig.placer.too_large(place("a", 200 * BLOCK - 1)) is None
    assert rig.placer.too_large(place("a", 200 * BLOCK)) == 200 * BLOCK
    assert Rig().placer.too_large(place("a", 10**9)) is None
    assert Rig(beat("p", P)).placer.too_large(place("a", 100 * BLOCK)) == 100 * BLOCK


def test_the_reason_names_the_worker_and_what_was_weighed() -> None:
    placement = Rig(beat("p", P), beat("d")).ask("a", 100)
    assert placement is not None
    assert placement.why == (
        "prefill on p of 1 (queued 0, uncached 100);"
        " decode on d of 1 (queued 0, neighbours 0, pulled 5, pressure 0)"
    )


def test_a_higher_class_is_given_the_places_and_blocks_of_lower_ones() -> None:
    rig = Rig(beat("d", worker=info(21, slots=3)))
    for number in range(3):
        assert rig.ask(f"job {number}", priority=-1_000)  # seven blocks each
    assert rig.ask("job 3", priority=-1_000) is None
    assert rig.ask("as low", priority=-1_000) is None
    for number in range(3):
        assert rig.ask(f"person {number}")
    assert rig.ask("person 3") is None  # nobody is below it any more
    assert rig.ask("urgent", priority=1)
    [view] = rig.view.workers.values()
    assert view.below(0) == (3, 21)
    taken = [(f"job {number}", 0) for number in range(3)]
    view.heard(beat("d", seq=2, load=Load(running=3, waiting=4, placements=taken), worker=info(21, slots=3)))
    assert view.below(0) == (3, 21)  # known to be there, as before
    for number in range(3):
        rig.view.placed((f"job {number}", 0))
    assert view.below(0) == (0, 0)
    assert view.below(1) == (3, 21)


def test_background_leaves_half_of_a_prefill_queue() -> None:
    half = score.QUEUE_STEPS // 2 * 256
    low = Ask(100, "fingerprint", {}, frozenset(), BACKGROUND)
    assert score.short_queue(low, worker(Load(waiting_tokens=half - 1)), 0)
    assert not score.short_queue(low, worker(Load(waiting_tokens=half)), 0)
    assert score.short_queue(ask(), worker(Load(waiting_tokens=half)), 0)
