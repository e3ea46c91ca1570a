"""Choices of one prompt: read once, the same tokens as if each had come alone, and no block lost or shared
that is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_rig import BLOCK, Rig, text, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.plan import StepPlan
from baton.engine.progress import Forked
from baton.engine.sequence import Sequence, Status
from baton.protocol.errors import Code
from baton.protocol.sampling import SamplingParams
from baton.protocol.sequence import Fork


class Forking(Rig):
    """A rig that copies blocks as a worker does; `forked` has the choices that have begun, by request."""

    def __init__(self, blocks: int = 64, **limits: Any) -> None:
        super().__init__(blocks, **limits)
        self.forked: dict[str, Sequence] = {}
        self.failed: dict[str, Forked] = {}
        self.computed = 0

    def step(self) -> StepPlan | None:
        plan = super().step()
        self.computed += plan.num_tokens if plan is not None else 0
        self.take([forked for news in self.news for forked in news.forked])
        return plan

    def take(self, forked: list[Forked]) -> None:
        for each in forked:
            if each.copy is not None:
                self.pages.data[each.copy[1]] = self.pages.data[each.copy[0]]
            into: Any = self.forked if each.failure is None else self.failed
            into[each.seq.request] = each.seq if each.failure is None else each
        self.engine.check()

    def add_all(
        self, name: str, prompt: list[int], params: SamplingParams, count: int, **more: Any
    ) -> Sequence:
        seq = self.add(name, prompt, params, **more)
        seq.forks = [Fork(f"{name}.{choice}", 1, choice) for choice in range(1, count)]
        return seq


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 5, **more})


def check(rig: Forking, first: Sequence, count: int) -> None:
    everyone = [first, *(rig.forked[f"{first.request}.{choice}"] for choice in range(1, count))]
    assert [seq.choice for seq in everyone] == list(range(count))
    for seq in everyone:
        assert seq.output == undisturbed(seq)
        assert seq.status is Status.FINISHED
    assert rig.pool.used == 0


def test_a_prompt_is_read_once_and_its_blocks_are_shared() -> None:
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5):
        rig = Forking(prefix_cache=False)
        first = rig.add_all("a", text(1, length), sampled(), 8)
        rig.step()
        assert len(rig.forked) == 7 and rig.computed == length
        shared = (length - 1) // BLOCK
        for seq in rig.forked.values():
            assert seq.blocks[:shared] == first.blocks[:shared] and seq.blocks[shared] not in first.blocks
        assert rig.pool.used == -(-length // BLOCK) + 7
        rig.run()
        assert rig.computed == length + 7 * 12 + 11  # the last token of the prompt once for each choice
        check(rig, first, 8)


def test_a_parent_that_ends_with_its_first_token() -> None:
    for prefix_cache in (True, False):
        rig = Forking(prefix_cache=prefix_cache)
        first = rig.add_all("a", text(1, 21), sampled(max_tokens=1), 5)
        rig.run()
        assert first.status is Status.FINISHED and rig.computed == 21 + 4
        check(rig, first, 5)


def test_choices_without_room_wait_and_read_the_cache() -> None:
    rig = Forking(blocks=8)
    first = rig.add_all("a", text(1, 3 * BLOCK + 2), sampled(), 9)
    rig.run()
    check(rig, first, 9)
    rig = Forking(max_sequences=3)
    first = rig.add_all("a", text(1, 3 * BLOCK + 2), sampled(), 9)
    rig.run()
    check(rig, first, 9)
    assert rig.computed < 3 * BLOCK + 2 + 8 * BLOCK + 9 * 12


def test_a_choice_that_finds_the_queue_full_is_told() -> None:
    rig = Forking(max_sequences=2, max_waiting=2)
    first = rig.add_all("a", text(1, 20), sampled(), 6)
    rig.run()
    assert len(rig.forked) == 3 and len(rig.failed) == 2
    assert {each.failure.code for each in rig.failed.values() if each.failure} == {Code.OVERLOADED}
    for seq in (first, *rig.forked.values()):
        assert seq.output == undisturbed(seq)


def test_one_choice_is_aborted_alone() -> None:
    rig = Forking()
    first = rig.add_all("a", text(1, 2 * BLOCK + 3), sampled(), 4)
    for _ in range(3):
        rig.step()
    assert rig.engine.abort("a.2", 1)
    rig.engine.check()
    rig.engine.abort("a", 1)
    rig.run()
    for name in ("a.1", "a.3"):
        assert rig.forked[name].output == undisturbed(rig.forked[name])
    assert rig.forked["a.2"].output_len < 12 and first.output_len < 12 and rig.pool.used == 0


def test_an_aborted_parent_takes_its_choices_along_before_they_begin() -> None:
    rig = Forking(max_batch_tokens=8)
    rig.add_all("a", text(1, 40), sampled(), 4)
    rig.step()
    rig.engine.abort("a", 1)
    assert rig.step() is None and not rig.forked and rig.pool.used == 0


def test_choices_go_along_with_a_hand_off() -> None:
    prefill, decode = Forking(), Forking()
    first = prefill.add_all("a", text(1, 3 * BLOCK + 3), sampled(), 6, prefill_only=True)
    while first.status is not Status.HELD:
        prefill.step()
    assert not prefill.forked and len(first.forks) == 5
    made = decode.engine.reserve(first.key, first.tokens[: first.prompt_len], "", 12, 0)
    assert made is not None
    for at, slot in enumerate(made.slots):
        decode.pages.data[slot] = prefill.pages.data[first.blocks[at]]
    seq = decode.engine.admit(made, first.to_state(0.0), 0.0)
    seq.forks = first.forks
    decode.take(decode.engine.fork(seq))
    prefill.engine.release(first)
    decode.run()
    assert decode.computed == 6 * 12 - 1 and prefill.pool.used == 0
    check(decode, seq, 6)


def test_choices_of_a_sequence_that_ends_at_prefill_are_held_one_by_one() -> None:
    rig = Forking()
    first = rig.add_all("a", text(1, 20), sampled(stop_token_ids=list(range(512))), 3, prefill_only=True)
    first.sampling.stop_token_ids[:] = [undisturbed(first)[0]]
    rig.run()
    assert first.status is Status.FINISHED
    for seq in rig.forked.values():
        assert seq.status in (Status.HELD, Status.FINISHED) and seq.output_len == 1
        rig.engine.release(seq)
    assert rig.pool.used == 0


@dataclass
class Order:
    at: int
    family: int
    length: int
    count: int
    output: int
    priority: int
    stops: tuple[tuple[int, int], ...]  # (choice, steps after arrival): aborted then


orders = st.lists(
    st.builds(
        Order,
        at=st.integers(0, 15),
        family=st.integers(0, 2),
        length=st.integers(1, 4 * BLOCK),
        count=st.integers(1, 6),
        output=st.integers(1, 2 * BLOCK),
        priority=st.sampled_from([0, 0, 1, 2]),
        stops=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 15)), max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=6,
)
limits = st.fixed_dictionaries(
    {
        "blocks": st.integers(7, 24),
        "max_batch_tokens": st.sampled_from([2, 7, 16, 64]),
        "max_sequences": st.integers(1, 8),
        "prefix_cache": st.booleans(),
    }
)


@given(orders, limits)
@settings(max_examples=100, deadline=None)
def test_any_mix_ends_with_its_exact_tokens(work: list[Order], limit: dict[str, Any]) -> None:
    rig = Forking(**limit)
    firsts: dict[int, Sequence] = {}
    stopped: set[str] = set()
    step = 0
    while step <= 30 or rig.engine.has_work:
        for index, order in enumerate(work):
            if order.at == step:
                params = sampled(max_tokens=order.output, seed=order.family)
                prompt = text(order.family, order.length)
                firsts[index] = rig.add_all(str(index), prompt, params, order.count, priority=order.priority)
            for choice, after in order.stops:
                if order.at + after == step and index in firsts:
                    name = f"{index}.{choice}" if choice else str(index)
                    if rig.engine.abort(name, 1):
                        stopped.add(name)
        assert rig.step() is not None or not rig.engine.has_work, "work, but nothing can run"
        step += 1
        assert step < 5_000, "no end"
    assert rig.pool.used == 0 and not rig.failed
    for index, order in enumerate(work):
        family = [firsts[index], *(rig.forked.get(f"{index}.{choice}") for choice in range(1, order.count))]
        for seq in family:
            if seq is None:
                assert str(index) in stopped
                continue
            assert seq.output == undisturbed(seq)[: seq.output_len]
            assert seq.output_len == order.output or seq.request in stopped
