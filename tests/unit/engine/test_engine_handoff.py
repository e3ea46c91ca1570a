"""The receiving side of a hand-off, with pages copied between two engines as a worker would pull them."""

from __future__ import annotations

import pytest
from engine_rig import BLOCK, Rig, refused, text, undisturbed

from baton.engine.reservations import Reservation
from baton.engine.sequence import Sequence, Status
from baton.protocol.errors import Code
from baton.protocol.sampling import SamplingParams


def held(rig: Rig, prompt: list[int], params: SamplingParams | None = None, *, priority: int = 0) -> Sequence:
    seq = rig.add("a", prompt, params, prefill_only=True, priority=priority)
    while seq.status is not Status.HELD:
        rig.step()
    return seq


def reserve(rig: Rig, seq: Sequence) -> Reservation | None:
    prompt = seq.tokens[: seq.prompt_len]
    return rig.engine.reserve(seq.key, prompt, seq.salt, seq.sampling.max_tokens, seq.priority)


def pull(rig: Rig, made: Reservation, source: Rig, seq: Sequence) -> None:
    sent = seq.blocks[made.hit_blocks :]
    rig.pages.data[made.slots] = source.pages.data[sent[: len(made.slots)]]


def hand_over(rig: Rig, source: Rig, seq: Sequence) -> Sequence:
    made = reserve(rig, seq)
    assert made is not None
    rig.engine.check()
    pull(rig, made, source, seq)
    arrived = rig.engine.admit(made, seq.to_state(source.now), rig.now)
    source.engine.release(seq)
    rig.engine.check()
    return arrived


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("hits", ["none", "prefill", "decode", "both"])
def test_every_length_and_hit(length: int, hits: str) -> None:
    prefill, decode = Rig(), Rig()
    prompt = text(1, length)
    for name, rig in (("prefill", prefill), ("decode", decode)):
        if hits in (name, "both"):
            rig.add("warm", [*prompt, 7], SamplingParams(max_tokens=2))
            rig.run()
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    arrived = hand_over(decode, prefill, held(prefill, prompt, params))
    assert arrived.status is Status.RUNNING and arrived.missing == 1
    decode.run()
    assert arrived.output == undisturbed(arrived)
    assert decode.pool.used == prefill.pool.used == 0
    decode.engine.check()


def test_only_what_is_not_there_is_to_be_pulled() -> None:
    prefill, decode = Rig(), Rig()
    prompt = text(1, 3 * BLOCK)
    decode.add("warm", prompt[: 2 * BLOCK + 1])
    decode.run()
    made = reserve(decode, held(prefill, prompt))
    assert made is not None
    assert made.hit_blocks == 2 and len(made.slots) == 1
    assert len(made.blocks) == 4, "and room for the first token's own K and V"
    decode.engine.cancel_reservation(made)
    decode.engine.cancel_reservation(made)
    assert decode.pool.used == 0
    decode.add("warm", [*prompt, 1])
    decode.run()
    made = decode.engine.reserve(("a", 1, 0), prompt, "", 8, 0)
    assert made is not None and made.hit_blocks == 3 and made.slots == []


def test_received_blocks_are_hits_only_after_the_commit() -> None:
    prefill, decode = Rig(), Rig()
    prompt = text(1, 2 * BLOCK + 3)
    seq = held(prefill, prompt)
    made = reserve(decode, seq)
    assert made is not None
    pull(decode, made, prefill, seq)
    assert decode.engine.prefix_hit(prompt, "") == 0
    assert decode.pool.drain_events() == ([], [])
    decode.engine.admit(made, seq.to_state(0.0), 0.0)
    assert decode.engine.prefix_hit(prompt, "") == 2 * BLOCK
    assert len(decode.pool.drain_events()[0]) == 2


def test_a_block_that_did_not_arrive_changes_the_text() -> None:
    prefill, decode = Rig(), Rig()
    seq = held(prefill, text(1, 3 * BLOCK), SamplingParams(max_tokens=8))
    made = reserve(decode, seq)
    assert made is not None
    pull(decode, made, prefill, seq)
    decode.pages.data[made.slots[1]] = 0
    arrived = decode.engine.admit(made, seq.to_state(0.0), 0.0)
    decode.run()
    assert arrived.output != undisturbed(arrived)


def test_a_full_receiver_says_so_and_holds_nothing() -> None:
    prefill, decode = Rig(), Rig(blocks=8)
    decode.add("busy", text(2, 5 * BLOCK), SamplingParams(max_tokens=9))
    decode.step()
    seq = held(prefill, text(1, 3 * BLOCK))
    used = decode.pool.used
    assert reserve(decode, seq) is None
    assert decode.pool.used == used
    decode.run()
    assert reserve(decode, seq) is not None


def test_places_count_reservations() -> None:
    prefill, decode = Rig(), Rig(max_sequences=1)
    seq = held(prefill, text(1, 3))
    made = reserve(decode, seq)
    assert made is not None
    assert decode.engine.reserve(("b", 1, 0), [1], "", 4, 0) is None
    local = decode.add("local", [1, 2])
    decode.engine.schedule(0.0)
    assert local.status is Status.WAITING
    decode.engine.cancel_reservation(made)
    decode.step()
    assert local.status is Status.RUNNING


def test_a_higher_class_takes_room_between_steps_only() -> None:
    decode = Rig(blocks=8)
    low = decode.add("low", text(2, 5 * BLOCK), SamplingParams(max_tokens=9))
    plan = decode.engine.schedule(0.0)
    assert plan is not None
    assert decode.engine.reserve(("a", 1, 0), text(1, 4 * BLOCK), "", 4, 1) is None
    decode.engine.commit(plan, decode.runner.execute(plan), 0.0)
    made = decode.engine.reserve(("a", 1, 0), text(1, 4 * BLOCK), "", 4, 1)
    assert made is not None and low.status is Status.WAITING
    decode.engine.check()
    decode.step()
    assert low.status is Status.WAITING, "a reservation is not pre-empted"
    decode.engine.cancel_reservation(made)
    decode.run()
    assert low.output == undisturbed(low)


def test_states_that_do_not_go_with_the_reservation() -> None:
    prefill, decode = Rig(), Rig()
    seq = held(prefill, text(1, 2 * BLOCK))
    made = reserve(decode, seq)
    assert made is not None
    pull(decode, made, prefill, seq)
    for change in (
        {"tokens": seq.to_state(0.0).tokens[4:]},
        {"salt": "other"},
        {"attempt": 2},
        {"computed": seq.known},
        {"computed": 2 * BLOCK + 1, "tokens": seq.to_state(0.0).tokens * 2},
    ):
        state = seq.to_state(0.0)
        for name, value in change.items():
            setattr(state, name, value)
        with refused(Code.TRANSFER_FAILED):
            decode.engine.admit(made, state, 0.0)
    decode.engine.check()
    arrived = decode.engine.admit(made, seq.to_state(0.0), 0.0)
    with refused(Code.STALE):
        decode.engine.admit(made, seq.to_state(0.0), 0.0)
    with refused(Code.STALE):
        reserve(decode, seq)
    decode.engine.cancel_reservation(made)  # too late: it is a sequence now
    decode.run()
    assert arrived.output == undisturbed(arrived)


def test_a_computed_count_under_the_hits_would_write_shared_blocks() -> None:
    prefill, decode = Rig(), Rig()
    prompt = text(1, 2 * BLOCK)
    decode.add("warm", [*prompt, 1])
    decode.run()
    seq = held(prefill, prompt)
    made = reserve(decode, seq)
    assert made is not None and made.hit_blocks == 2
    state = seq.to_state(0.0)
    state.computed = BLOCK
    with refused(Code.TRANSFER_FAILED):
        decode.engine.admit(made, state, 0.0)


def test_what_can_never_fit_is_refused_by_name() -> None:
    decode = Rig(blocks=4)
    with refused(Code.CONTEXT_LENGTH):
        decode.engine.reserve(("a", 1, 0), text(1, 4 * BLOCK), "", 40, 0)
    assert decode.engine.reserve(("a", 1, 0), text(1, 3 * BLOCK), "", BLOCK + 1, 0) is not None
    with refused(Code.STALE):
        decode.engine.reserve(("a", 1, 0), text(1, 3), "", 1, 0)


def test_pre_empted_at_the_receiver_it_goes_on_there() -> None:
    prefill, decode = Rig(), Rig(blocks=8)
    old = decode.add("old", text(2, 2 * BLOCK), SamplingParams(max_tokens=30))
    decode.step()
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=9, frequency_penalty=0.4)
    arrived = hand_over(decode, prefill, held(prefill, text(1, 2 * BLOCK), params))
    decode.step()
    assert [news.new_full_blocks for news in decode.news] == [range(0)] * 2, "only what was computed here"
    decode.run()
    assert arrived.preemptions and not old.preemptions
    assert arrived.output == undisturbed(arrived) and old.output == undisturbed(old)


def test_pre_empted_it_waits_ahead_of_an_older_one_that_never_ran() -> None:
    prefill, decode = Rig(), Rig(blocks=8)
    seq = held(prefill, text(1, 2 * BLOCK), SamplingParams(max_tokens=30))
    old = decode.add("old", text(2, 2 * BLOCK), SamplingParams(max_tokens=30))
    decode.step()
    large = decode.add("large", text(3, 7 * BLOCK), SamplingParams(max_tokens=2))
    arrived = hand_over(decode, prefill, seq)
    assert large.order < arrived.order
    while not arrived.preemptions:
        decode.step()
    assert decode.engine.scheduler.waiting == [arrived, large]
    decode.run()
    for one in (old, arrived, large):
        assert one.output == undisturbed(one)
