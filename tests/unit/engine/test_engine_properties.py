"""Anything may happen in any order, in pools too small for it: every sequence ends, with its exact tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine_rig import BLOCK, Rig, text, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.reservations import Reservation
from baton.engine.sequence import Sequence, Status
from baton.protocol.sampling import SamplingParams


@dataclass
class Order:
    """One request of a generated workload."""

    at: int  # arrives before this step
    family: int  # equal families share their prompt's start
    length: int
    output: int
    priority: int
    temperature: float
    penalty: float
    abort_after: int | None  # steps after its arrival
    attempts: list[Sequence] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            seed=self.family,
            temperature=self.temperature,
            top_p=0.95,
            frequency_penalty=self.penalty,
            max_tokens=self.output,
        )


orders = st.lists(
    st.builds(
        Order,
        at=st.integers(0, 25),
        family=st.integers(0, 3),
        length=st.integers(1, 5 * BLOCK),
        output=st.integers(1, 3 * BLOCK),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        temperature=st.sampled_from([0.0, 1.0]),
        penalty=st.sampled_from([0.0, 0.5]),
        abort_after=st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=14,
)
limits = st.fixed_dictionaries(
    {
        "blocks": st.integers(8, 20),
        "max_batch_tokens": st.sampled_from([1, 2, 7, 16, 64]),
        "max_sequences": st.integers(1, 6),
        "prefix_cache": st.booleans(),
    }
)


@given(orders, limits)
@settings(max_examples=120, deadline=None)
def test_one_engine(work: list[Order], limit: dict[str, Any]) -> None:
    rig = Rig(**limit)
    seqs: dict[int, Sequence] = {}
    step = 0
    while step <= 25 or rig.engine.has_work:
        for index, order in enumerate(work):
            if order.at == step:
                seqs[index] = rig.add(
                    str(index), text(order.family, order.length), order.params, priority=order.priority
                )
        plan = rig.engine.schedule(float(step))
        assert plan is not None or not rig.engine.has_work, "work, but nothing can run"
        for index, order in enumerate(work):
            if order.abort_after is not None and order.at + order.abort_after == step:
                rig.engine.abort(str(index), 1)
        rig.engine.check()
        if plan is not None:
            assert plan.num_tokens <= limit["max_batch_tokens"] and len(plan.slices) <= limit["max_sequences"]
            rig.engine.commit(plan, rig.runner.execute(plan), float(step))
        rig.engine.check()
        step += 1
        assert step < 5_000, "no end"
    assert rig.pool.used == 0
    for index, order in enumerate(work):
        output = seqs[index].output
        assert output == undisturbed(seqs[index])[: len(output)]
        assert len(output) == order.output or order.abort_after is not None


class Pair:
    """A prefill and a decode engine, and a courier that carries blocks and states between them."""

    def __init__(self, prefill_blocks: int, decode_blocks: int) -> None:
        self.prefill = Rig(prefill_blocks, max_batch_tokens=16)
        self.decode = Rig(decode_blocks, max_batch_tokens=16)
        self.under_way: dict[int, Reservation] = {}
        self.done: dict[int, Sequence] = {}

    def send(self, index: int, order: Order) -> None:
        seq = self.prefill.add(
            str(index),
            text(order.family, order.length),
            order.params,
            attempt=len(order.attempts) + 1,
            priority=order.priority,
            prefill_only=True,
        )
        order.attempts.append(seq)

    def copy(self, seq: Sequence, made: Reservation, full: int) -> None:
        """Pull the blocks from the first one not here to `full` - 1."""
        for at in range(made.hit_blocks, full):
            self.decode.pages.data[made.slots[at - made.hit_blocks]] = self.prefill.pages.data[seq.blocks[at]]

    def offer(self, index: int, order: Order, seq: Sequence) -> None:
        """Reserve at the decode engine, or give this attempt up."""
        prompt = seq.tokens[: seq.prompt_len]
        made = self.decode.engine.reserve(seq.key, prompt, "", order.output, order.priority)
        if made is None:
            self.prefill.engine.abort(seq.request, seq.attempt)
        else:
            self.under_way[index] = made

    def carry(self, work: list[Order]) -> None:
        """After a step of prefill: offers, copies of what is finished, commits."""
        for index, order in enumerate(work):
            seq = order.attempts[-1] if order.attempts else None
            if seq is None or index in self.done:
                continue
            if seq.status is Status.FINISHED:
                made = self.under_way.pop(index, None)
                if made is not None:
                    self.decode.engine.cancel_reservation(made)
                if seq.output_len == seq.max_len - seq.prompt_len:
                    self.done[index] = seq  # ended with its first token
                else:
                    self.send(index, order)
                continue
            if seq.announced or seq.status is Status.HELD:
                if index not in self.under_way:
                    self.offer(index, order, seq)
                made = self.under_way.get(index)
                if made is not None:
                    self.copy(seq, made, seq.announced)
                    if seq.status is Status.HELD:
                        self.commit(index, seq, made)

    def commit(self, index: int, seq: Sequence, made: Reservation) -> None:
        self.copy(seq, made, -(-seq.prompt_len // BLOCK))
        self.done[index] = self.decode.engine.admit(made, seq.to_state(0.0), 0.0)
        del self.under_way[index]
        self.prefill.engine.release(seq)


@given(orders, st.integers(8, 16), st.integers(9, 20))
@settings(max_examples=80, deadline=None)
def test_two_engines_and_a_hand_off(work: list[Order], prefill_blocks: int, decode_blocks: int) -> None:
    pair = Pair(prefill_blocks, decode_blocks)
    step = 0
    while step <= 25 or len(pair.done) < len(work) or pair.decode.engine.has_work:
        for index, order in enumerate(work):
            if order.at == step:
                pair.send(index, order)
        pair.prefill.step()
        pair.carry(work)
        pair.prefill.engine.check()
        pair.decode.step()
        step += 1
        assert step < 5_000, "no end"
    assert pair.prefill.pool.used == pair.decode.pool.used == 0
    for index, order in enumerate(work):
        seq = pair.done[index]
        assert seq.output == undisturbed(seq) and len(seq.output) == order.output


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_chunks_and_neighbours_change_nothing(lengths: list[int], budget: int) -> None:
    whole, chunked = Rig(128, max_batch_tokens=4_096), Rig(128, max_batch_tokens=budget)
    params = SamplingParams(max_tokens=5, temperature=1.0, logprobs=2)
    runs = []
    for rig in (whole, chunked):
        runs.append([rig.add(str(at), text(at, length), params) for at, length in enumerate(lengths)])
        rig.run()
    for one, other in zip(*runs, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs


def test_a_stream_of_small_hand_offs_does_not_starve_a_large_one() -> None:
    rig = Rig(blocks=12)
    pending: list[Reservation] = []
    large: Sequence | None = None
    for step in range(400):
        made = rig.engine.reserve((f"small{step}", 1, 0), text(step % 200, 2 * BLOCK), "", 4, 0)
        if made is not None:
            pending.append(made)
        if step == 20:
            large = rig.add("large", text(3, 9 * BLOCK), SamplingParams(max_tokens=3))
        if len(pending) > 2 or (made is None and pending):
            rig.engine.cancel_reservation(pending.pop(0))
        rig.step()
        if large is not None and large.status is Status.FINISHED:
            assert large.output == undisturbed(large)
            return
    raise AssertionError("the large one never ran")
