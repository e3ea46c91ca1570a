"""Draining: what runs moves away with its KV blocks, what has not begun goes back, what is short ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from worker_rig import Gate, Node, Rig, prompt, running, until

from baton.bus.connection import CallRejected
from baton.config.settings import BusSettings
from baton.protocol.errors import Code
from baton.protocol.handoff import Commit, Offer
from baton.protocol.liveness import Role, State
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens

TOKENS = prompt(100)
LONG = SamplingParams(max_tokens=300)


@pytest.fixture
async def rig(nats_server: BusSettings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(nats_server, tmp_path) as made:
        yield made


async def decoding(rig: Rig, params: SamplingParams = LONG, **options: Any) -> Node:
    """A decode worker in the middle of a request."""
    node = await rig.add(Role.DECODE, **{"mock__step_us": 2_000, **options})
    await rig.player.run(node, "r", TOKENS, params)
    await rig.player.tokens("r", 20)  # the first twenty or so
    return node


async def test_a_running_sequence_moves_with_its_blocks(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    seen = await rig.sniff(target)
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)
    assert rig.player.senders["r"] == {source.host.id, target.host.id}
    assert not rig.player.failures
    commit = next(message for message in seen if isinstance(message, Commit))
    assert commit.state.computed == len(commit.state.known()) - 1  # nothing was computed again
    timing = rig.player.streams["r"].timing
    assert timing is not None and timing.handoff_bytes >= 7 * 4_096


async def test_sampled_penalised_and_with_logprobs_it_moves_twice(rig: Rig) -> None:
    params = SamplingParams(
        max_tokens=120, temperature=0.9, seed=4, frequency_penalty=0.3, repetition_penalty=1.1, logprobs=2
    )
    first = await decoding(rig, params)
    second, third = await rig.add(Role.DECODE, mock__step_us=2_000), await rig.add(Role.DECODE)
    await rig.player.move(first, second, "r", attempt=0, successor=1)
    await rig.player.tokens("r", 50)
    await rig.player.move(second, third, "r", attempt=1, successor=2)
    assert await rig.player.result("r") == expected_tokens(TOKENS, params)
    assert len(rig.player.logprobs["r"]) == 120


async def test_tokens_lost_before_the_move_come_from_its_target(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    rig.player.lose = lambda item: item.attempt == 0
    await asyncio.sleep(0.05)  # tokens that the player will never have had
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def test_cancel_of_the_old_attempt_does_not_stop_a_move(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    await rig.player.cancel("r", source, target, attempt=0)  # as a tokenizer answers stale tokens
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def test_cancel_of_the_new_attempt_frees_both_ends(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    gate = Gate(target)
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    await gate.wait()
    await rig.player.cancel("r", source, target, attempt=1)
    await rig.clean(timeout_s=1.0)


async def test_a_move_that_is_refused_is_told_and_replayed(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    held = target.engine.borrow(target.pool.num_blocks - 4)
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    assert (await rig.player.failure("r")).code is Code.DECODE_FULL
    target.engine.give_back(held)
    await rig.player.run(target, "r", TOKENS, LONG, attempt=2)
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def test_a_move_to_a_dead_worker_is_told_and_replayed(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    await target.kill()
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    assert (await rig.player.failure("r")).code is Code.WORKER_LOST
    await rig.player.run(source, "r", TOKENS, LONG, attempt=2)
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def test_what_is_not_here_cannot_be_moved(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    with pytest.raises(CallRejected) as refused:
        await rig.player.move(source, target, "r", attempt=5, successor=6)
    assert refused.value.failure.code is Code.STALE
    rig.player.streams["r"].restart(0)
    await rig.player.resume(source, "r")
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def test_a_sequence_that_ends_at_the_border_ends_where_it_is(rig: Rig) -> None:
    target = await rig.add(Role.DECODE)
    source = await decoding(rig, SamplingParams(max_tokens=21), mock__step_us=100_000)
    seen = await rig.sniff(target)
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    assert len(await rig.player.result("r")) == 21
    await rig.clean()
    assert not any(isinstance(message, Commit) for message in seen)


async def drain(node: Node, grace_s: float = 5.0) -> float:
    began = time.monotonic()
    await node.worker.drain(grace_s)
    return time.monotonic() - began


async def test_a_draining_worker_says_what_can_move_and_is_empty_once_it_has(rig: Rig) -> None:
    source, target = await decoding(rig), await rig.add(Role.DECODE)
    draining = asyncio.create_task(drain(source))
    await until(lambda: bool(rig.player.leaving))
    assert rig.player.leaving[0].requests == [("r", 0)]
    await rig.player.move(source, target, "r", attempt=0, successor=1)
    assert await draining < 3.0
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def test_a_draining_worker_takes_nothing_new_and_lets_short_work_end(rig: Rig) -> None:
    source = await decoding(rig, SamplingParams(max_tokens=30), mock__step_us=20_000)
    prefill = await rig.add(Role.PREFILL)
    draining = asyncio.create_task(drain(source))
    await asyncio.sleep(0.05)
    with pytest.raises(CallRejected) as refused:
        await rig.player.run(source, "new", TOKENS, LONG)
    assert refused.value.failure.code is Code.DRAINING
    await rig.player.run(prefill, "offered", TOKENS, LONG, decode=source)
    assert (await rig.player.failure("offered")).code is Code.DRAINING
    assert await draining < 3.0
    assert len(await rig.player.result("r")) == 30
    assert not rig.player.leaving


async def test_a_draining_worker_gives_back_what_has_not_begun(rig: Rig) -> None:
    source = await decoding(rig)
    blocker = source.engine.borrow(source.engine.scheduler.room())
    await rig.player.run(source, "queued", prompt(200, 3), LONG)
    draining = asyncio.create_task(drain(source, 1.0))
    assert (await rig.player.failure("queued")).code is Code.DRAINING
    assert await draining >= 1.0  # nobody ordered a move: it waits for its grace
    source.engine.give_back(blocker)
    await source.stop()  # and then gives back what is left
    assert (await rig.player.failure("r")).code is Code.DRAINING


async def test_a_hand_off_under_way_ends_before_its_sender_leaves(rig: Rig) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=32, mock__token_us=1_000)
    seen = await rig.sniff(decode)
    await rig.player.run(prefill, "r", TOKENS, SamplingParams(max_tokens=20), decode=decode)
    await until(lambda: any(isinstance(message, Offer) for message in seen))
    assert await drain(prefill) < 4.0
    assert await rig.player.result("r") == expected_tokens(TOKENS, SamplingParams(max_tokens=20))


async def test_an_engine_that_hangs_makes_its_worker_unhealthy_and_gives_its_work_back(rig: Rig) -> None:
    node = await decoding(rig, step_timeout_ms=500)
    runner, execute, hang = node.worker._runner, node.worker._runner.execute, asyncio.Event()
    loop = asyncio.get_running_loop()

    def hung(plan: Any) -> Any:
        asyncio.run_coroutine_threadsafe(_wait(hang), loop).result()
        return execute(plan)

    runner.execute = hung
    failure = await rig.player.failure("r")
    assert failure.code is Code.DRAINING and "has not ended" in failure.message
    assert node.host.beat.state is State.UNHEALTHY and "step" in node.host.beat.note
    with pytest.raises(CallRejected):
        await rig.player.run(node, "new", TOKENS, LONG)
    hang.set()
    other = await rig.add(Role.DECODE)
    await rig.player.run(other, "r", TOKENS, LONG, attempt=1)
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_step_that_fails_ends_its_requests_and_no_other(rig: Rig) -> None:
    node = await decoding(rig)
    runner, execute = node.worker._runner, node.worker._runner.execute
    failed = []

    def failing(plan: Any) -> Any:
        if not failed:
            failed.append(plan)
            raise RuntimeError("a test breaks this step")
        return execute(plan)

    runner.execute = failing
    assert (await rig.player.failure("r")).code is Code.INTERNAL
    await rig.player.run(node, "r", TOKENS, LONG, attempt=1)
    assert await rig.player.result("r") == expected_tokens(TOKENS, LONG)
