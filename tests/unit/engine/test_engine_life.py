"""The engine as a worker drives it: add, step, hold, abort, hand over, refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_rig import BLOCK, Rig, refused, text, undisturbed

from baton.engine.plan import FAILED, Sampled, StepResult
from baton.engine.sequence import Sequence, Status
from baton.protocol.errors import Code
from baton.protocol.sampling import SamplingParams


def test_a_request_from_start_to_end() -> None:
    rig = Rig()
    prompt = text(1, BLOCK + 3)
    seq = rig.add("a", prompt, SamplingParams(max_tokens=4, logprobs=1))
    assert seq.status is Status.WAITING
    rig.step()
    (first,) = rig.news
    assert first.seq is seq and first.first and len(first.logprobs) == 1 and not first.finish
    assert first.new_full_blocks == range(1)
    for _ in range(3):
        rig.step()
    assert rig.news[0].finish == "length" and not rig.news[0].first
    assert seq.output == undisturbed(seq) and len(seq.logprobs) == 4
    assert (seq.first_scheduled, seq.first_token, seq.finished) == (1.0, 1.0, 4.0)
    assert rig.engine.load().blocks_used == 0 and not rig.engine.has_work
    assert rig.engine.schedule(9.0) is None
    assert rig.engine.get("a", 1) is None


def test_a_stop_id_ends_it() -> None:
    rig = Rig()
    plain = rig.add("a", text(1, 5))
    rig.run()
    stop = plain.output[3]
    at = plain.output.index(stop)
    seq = rig.add("b", text(1, 5), SamplingParams(max_tokens=8, stop_token_ids=[stop]))
    rig.run()
    assert seq.output == plain.output[: at + 1], "the stop token is there"
    assert rig.news[0].finish == "stop"


def test_the_end_of_the_context_ends_it() -> None:
    rig = Rig(max_context=20)
    seq = rig.add("a", text(1, 15), SamplingParams(max_tokens=50))
    rig.run()
    assert seq.known == 20 and rig.news[0].finish == "length"
    assert seq.output == undisturbed(seq)[:5]


@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int) -> None:
    rig = Rig()
    rig.add("a", text(1, length))
    rig.run()
    seq = rig.add("b", text(1, length))
    plan = rig.step()
    assert plan is not None
    hit = (length - 1) // BLOCK * BLOCK
    assert (seq.cached_tokens, plan.slices[0].start) == (hit, hit)
    assert rig.news[0].new_full_blocks == range(length // BLOCK), "hits are named with the first step's"
    rig.run()
    assert seq.output == undisturbed(seq)
    assert rig.engine.prefix_hit(text(1, length), "") == 2 * BLOCK


def test_two_at_once_share_what_is_computed() -> None:
    rig = Rig(max_batch_tokens=2 * BLOCK)
    first = rig.add("a", text(1, 2 * BLOCK + 2))
    rig.step()
    second = rig.add("b", text(1, 2 * BLOCK + 4))
    rig.step()
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]
    rig.run()
    assert first.output == undisturbed(first) and second.output == undisturbed(second)


def test_salts_keep_apart_and_the_switch_turns_it_off() -> None:
    rig, off = Rig(), Rig(prefix_cache=False)
    for some in (rig, off):
        some.add("a", text(1, 20), salt="x")
        some.run()
    assert rig.add("b", text(1, 20), salt="y") and rig.step() and rig.news[0].seq.cached_tokens == 0
    assert rig.add("c", text(1, 20), salt="x") and rig.step() and rig.news[-1].seq.cached_tokens == 2 * BLOCK
    again = off.add("b", text(1, 20), salt="x")
    off.run()
    assert again.cached_tokens == 0 and again.output == undisturbed(again)
    assert off.pool.drain_events() == ([], [])
    assert off.engine.prefix_hit(text(1, 20), "x") == 0


def test_output_blocks_are_reused_too() -> None:
    rig = Rig()
    seq = rig.add("a", text(1, 5), SamplingParams(max_tokens=3 * BLOCK))
    rig.run()
    turn = rig.add("b", seq.tokens + text(2, 6))
    rig.run()
    assert turn.cached_tokens == 3 * BLOCK and turn.output == undisturbed(turn)


@pytest.mark.parametrize(
    ("prompt", "params", "code", "words"),
    [
        ([], {}, Code.INVALID_REQUEST, "0 tokens"),
        (text(1, 4_096), {}, Code.CONTEXT_LENGTH, "4096"),
        (text(1, 400), {"max_tokens": 200}, Code.CONTEXT_LENGTH, "599"),
        ([1, 512], {}, Code.INVALID_REQUEST, "512"),
        ([1, -1], {}, Code.INVALID_REQUEST, "-1"),
        ([1], {"logit_bias": {512: 1.0}}, Code.INVALID_REQUEST, "512"),
        ([1], {"stop_token_ids": [900]}, Code.INVALID_REQUEST, "900"),
        ([1], {"max_tokens": 0}, Code.INVALID_REQUEST, "nothing is left"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], params: dict[str, Any], code: Code, words: str
) -> None:
    rig = Rig(blocks=64)
    with refused(code, words):
        rig.add("a", prompt, SamplingParams(**params))
    assert not rig.engine.has_work


def test_the_largest_that_fits_runs() -> None:
    rig = Rig(blocks=4)
    seq = rig.add("a", text(1, 2 * BLOCK), SamplingParams(max_tokens=2 * BLOCK + 1))
    rig.run()
    assert seq.output == undisturbed(seq) and seq.known == 4 * BLOCK + 1


def test_a_full_queue_and_a_second_of_the_same_are_refused() -> None:
    rig = Rig(max_waiting=1)
    rig.add("a", [1])
    with refused(Code.OVERLOADED):
        rig.add("b", [1])
    rig.step()
    with refused(Code.STALE):
        rig.add("a", [1])


def test_abort_covers_lower_attempts_in_every_state() -> None:
    rig = Rig(max_sequences=1)
    held = rig.add("a", text(1, 20), attempt=1, prefill_only=True)
    rig.step()
    running = rig.add("a", text(1, 20), attempt=2)
    rig.step()
    waiting = rig.add("a", text(1, 20), attempt=3)
    later = rig.add("a", text(1, 20), attempt=5)
    other = rig.add("b", text(2, 20))
    assert [seq.status.value for seq in (held, running, waiting)] == ["held", "running", "waiting"]
    assert rig.engine.abort("a", 4)
    rig.engine.check()
    assert {seq.status for seq in (held, running, waiting)} == {Status.FINISHED}
    assert rig.pool.used == 0
    assert not rig.engine.abort("a", 4)
    rig.run()
    assert later.output == undisturbed(later) and other.output == undisturbed(other)


def test_abort_in_a_step_keeps_the_blocks_until_its_commit() -> None:
    rig = Rig()
    doomed, other = rig.add("a", text(1, 20)), rig.add("b", text(2, 20))
    plan = rig.engine.schedule(0.0)
    assert plan is not None and rig.engine.in_step
    used = rig.pool.used
    assert rig.engine.abort("a", 1)
    assert rig.pool.used == used and doomed.blocks
    rig.engine.check()
    with pytest.raises(RuntimeError, match="not been committed"):
        rig.engine.schedule(0.0)
    news = rig.engine.commit(plan, rig.runner.execute(plan), 1.0)
    assert [progress.seq for progress in news] == [other]
    assert rig.pool.used == len(other.blocks)
    rig.engine.check()
    assert rig.engine.prefix_hit(text(1, 20), "") == 0, "nobody vouches for what an aborted step wrote"
    with pytest.raises(RuntimeError, match="awaited"):
        rig.engine.commit(plan, StepResult([None, None]), 1.0)


def test_logits_that_are_not_finite_end_that_sequence_only() -> None:
    rig = Rig()
    bad, good = rig.add("a", text(1, 9)), rig.add("b", text(2, 9))
    plan = rig.engine.schedule(0.0)
    assert plan is not None
    result = rig.runner.execute(plan)
    result.samples[0] = Sampled(FAILED)
    news = rig.engine.commit(plan, result, 0.0)
    assert news[0].failure is not None and news[0].failure.code is Code.INTERNAL and not news[0].new_tokens
    assert bad.status is Status.FINISHED and news[1].failure is None
    assert rig.engine.prefix_hit(text(1, 9), "") == 0, "its blocks are not offered to others"
    rig.engine.check()
    rig.run()
    assert good.output == undisturbed(good)


def test_prefill_only_is_held_and_released() -> None:
    rig = Rig(max_batch_tokens=BLOCK)
    seq = rig.add("a", text(1, 2 * BLOCK + 2), prefill_only=True)
    ready = []
    for _ in range(3):
        rig.step()
        ready.append(rig.news[0].new_full_blocks)
    assert ready == [range(1), range(1, 2), range(0)]
    assert seq.status is Status.HELD and rig.news[0].new_tokens == undisturbed(seq)[:1]
    assert (seq.computed, seq.known, len(seq.blocks)) == (2 * BLOCK + 2, 2 * BLOCK + 3, 3)
    assert not rig.engine.has_work and rig.pool.used == 3
    rig.engine.release(seq)
    rig.engine.release(seq)
    assert rig.pool.used == 0 and rig.engine.prefix_hit(seq.tokens, "") == 2 * BLOCK
    rig.engine.check()


def test_prefill_only_that_ends_with_its_first_token_ends_there() -> None:
    rig = Rig()
    seq = rig.add("a", text(1, 9), SamplingParams(max_tokens=1), prefill_only=True)
    rig.step()
    assert rig.news[0].finish == "length" and seq.status is Status.FINISHED and rig.pool.used == 0


def test_a_sequence_moves_as_its_state() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, presence_penalty=0.5, logprobs=2)
    rig, other = Rig(), Rig()
    seq = rig.add("a", text(1, 10), params, salt="s", priority=3)
    for _ in range(5):
        rig.step()
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(seq.to_state(0.0)), type=type(seq.to_state(0.0)))
    assert state.computed == 14 and state.prompt_len == 10 and len(state.logprobs) == 5
    replay = Sequence.from_state(state, 0.0)
    assert replay.computed == 0 and replay.key == seq.key and replay.rank[0] == -3
    other.engine.add(replay)
    other.run()
    rig.run()
    assert replay.tokens == seq.tokens == seq.tokens[:10] + undisturbed(seq)
    assert replay.logprobs == seq.logprobs


def test_deadlines_travel_as_what_is_left() -> None:
    seq = Sequence("a", 1, [1], 1, deadline=10.0)
    assert seq.to_state(8.5).deadline_ms == 1_500
    assert seq.to_state(11.0).deadline_ms == 0
    assert Sequence.from_state(seq.to_state(8.5), 100.0).deadline == pytest.approx(101.5)
    assert Sequence("a", 1, [1], 1).to_state(3.0).deadline_ms == 600_000


def test_blocks_from_the_store_are_hits() -> None:
    rig, store = Rig(), Rig()
    prompt = text(1, 4 * BLOCK + 2)
    source = store.add("s", prompt, prefill_only=True)
    store.run()
    rig.add("a", prompt[: BLOCK + 1])
    rig.run()
    slots = rig.engine.borrow(3)
    assert slots is not None
    rig.engine.check()
    rig.pages.data[slots] = store.pages.data[source.blocks[1:4]]
    rig.engine.seed_cached(prompt, "", 1, slots)
    rig.engine.check()
    assert rig.pool.used == 0
    seq = rig.add("b", prompt)
    rig.run()
    assert seq.cached_tokens == 4 * BLOCK and seq.output == undisturbed(seq)


def test_a_loan_can_be_given_back_and_respects_the_watermark() -> None:
    rig = Rig(blocks=8)
    rig.add("a", text(1, 2 * BLOCK), SamplingParams(max_tokens=9))
    rig.step()
    assert rig.engine.borrow(6) is None
    slots = rig.engine.borrow(5)
    assert slots is not None
    rig.engine.give_back(slots)
    rig.engine.check()
    assert rig.pool.used == 2 and rig.engine.prefix_hit(text(1, BLOCK), "") == BLOCK
    rig.add("blocked", text(2, 6 * BLOCK))
    rig.step()
    assert rig.engine.borrow(1) is None, "a sequence waits for them"


def test_a_full_house_may_still_borrow() -> None:
    rig = Rig(max_sequences=1)
    rig.add("a", text(1, 4))
    rig.add("b", text(2, 4))
    rig.step()
    slots = rig.engine.borrow(2)
    assert slots is not None, "b waits for a place, not for blocks"
    rig.engine.give_back(slots)
    assert Rig(prefix_cache=False).engine.borrow(1) is None


def test_load_says_what_is_still_to_read() -> None:
    rig = Rig(max_batch_tokens=16)
    rig.add("a", text(1, 40))
    rig.add("b", text(2, 10))
    rig.step()
    load = rig.engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 34)
    assert (load.blocks_used, load.blocks_total) == (5, 64)
