"""The hand-off between real workers when nothing goes wrong, or only what must not matter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from worker_rig import BLOCK, Gate, Node, Rig, prompt, running, until

from baton.bus.connection import CallRejected
from baton.config.settings import BusSettings
from baton.protocol.codec import Codec
from baton.protocol.errors import Code
from baton.protocol.handoff import Commit, Committed, Offer, Ready, Refused
from baton.protocol.liveness import Role
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens

TWENTY = SamplingParams(max_tokens=20)


@pytest.fixture
async def rig(nats_server: BusSettings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(nats_server, tmp_path) as made:
        yield made


@pytest.mark.parametrize("transports", [("shm",), ("tcp",), ("tcp", "shm")], ids="+".join)
async def test_every_length_around_a_block(rig: Rig, transports: tuple[str, ...]) -> None:
    prefill, decode = await rig.pair(transports=transports)
    lengths = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 400)
    for length in lengths:
        await rig.player.run(prefill, f"r{length}", prompt(length, length), TWENTY, decode=decode)
    for length in lengths:
        tokens = await rig.player.result(f"r{length}")
        assert tokens == expected_tokens(prompt(length, length), TWENTY), length
        assert rig.player.senders[f"r{length}"] == {"decode-1"}
        timing = rig.player.streams[f"r{length}"].timing
        assert timing is not None and timing.transport == transports[0]
        assert timing.handoff_bytes == -(-length // BLOCK) * 4_096
        assert (timing.prefill_worker, timing.decode_worker) == ("prefill-0", "decode-1")


async def test_many_at_once(rig: Rig) -> None:
    prefill, decode = await rig.pair(kv_memory_mb=8)
    kinds = [
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=seed, presence_penalty=0.4, logprobs=2)
        for seed in range(16)
    ]
    prompts = [prompt(10 + 17 * index, index) for index in range(16)]
    texts = [expected_tokens(tokens, params) for tokens, params in zip(prompts, kinds, strict=True)]
    for index, (tokens, params) in enumerate(zip(prompts, kinds, strict=True)):
        await rig.player.run(prefill, f"r{index}", tokens, params, decode=decode)
    assert [await rig.player.result(f"r{index}") for index in range(16)] == texts
    assert {len(rig.player.logprobs[f"r{index}"]) for index in range(16)} == {24}


async def hand_over(rig: Rig, name: str, tokens: list[int], prefill: Node, decode: Node) -> int:
    """Bytes moved by one hand-off, its text checked."""
    await rig.player.run(prefill, name, tokens, TWENTY, decode=decode)
    assert await rig.player.result(name) == expected_tokens(tokens, TWENTY)
    timing = rig.player.streams[name].timing
    assert timing is not None
    return timing.handoff_bytes // 4_096


async def test_a_hit_at_prefill_is_sent_on(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    other = await rig.add(Role.DECODE)
    tokens = prompt(100)
    assert await hand_over(rig, "cold", tokens, prefill, other) == 7
    assert await hand_over(rig, "hit", tokens, prefill, decode) == 7
    assert rig.player.items["hit"][0].cached_tokens == 96


async def test_what_decode_holds_is_not_sent_again(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    other = await rig.add(Role.PREFILL)
    tokens = prompt(100)
    assert await hand_over(rig, "cold", tokens, prefill, decode) == 7
    assert await hand_over(rig, "there", tokens, other, decode) == 1  # the partial block
    assert await hand_over(rig, "both", tokens, prefill, decode) == 1
    assert await hand_over(rig, "longer", tokens + prompt(60, 5), prefill, decode) == 4
    assert await hand_over(rig, "whole", tokens[:96], prefill, decode) == 0  # a full hit: nothing moves


async def test_without_a_prefix_cache_nothing_is_reused(rig: Rig) -> None:
    prefill, decode = await rig.pair(prefix_cache=False)
    for name in ("first", "second"):
        assert await hand_over(rig, name, prompt(100), prefill, decode) == 7


async def test_another_salt_is_no_hit(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    tokens = prompt(96)
    for salt in ("", "a", "b"):
        await rig.player.run(prefill, f"r{salt}", tokens, TWENTY, decode=decode, salt=salt)
        assert await rig.player.result(f"r{salt}") == expected_tokens(tokens, TWENTY)
        timing = rig.player.streams[f"r{salt}"].timing
        assert timing is not None and timing.handoff_bytes == 6 * 4_096


async def test_what_ends_with_its_first_token_ends_at_prefill(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    seen = await rig.sniff(decode)
    one = SamplingParams(max_tokens=1)
    tokens = prompt(50)
    await rig.player.run(prefill, "one", tokens, one, decode=decode)
    assert await rig.player.result("one") == expected_tokens(tokens, one)
    first = expected_tokens(tokens, TWENTY)[0]
    stops = SamplingParams(max_tokens=20, stop_token_ids=[first])
    await rig.player.run(prefill, "stop", tokens, stops, decode=decode)
    assert await rig.player.result("stop") == [first]
    assert rig.player.streams["stop"].finish == "stop"
    await rig.clean()
    assert not [message for message in seen if isinstance(message, Commit)]
    assert not [message for message in seen if isinstance(message, Offer) and message.request == "one"]


async def test_a_short_prompt_is_prefilled_where_it_decodes(rig: Rig) -> None:
    _, decode = await rig.pair()
    await rig.player.run(decode, "here", prompt(20), TWENTY)
    assert await rig.player.result("here") == expected_tokens(prompt(20), TWENTY)
    timing = rig.player.streams["here"].timing
    assert timing is not None and timing.prefill_worker == timing.decode_worker == "decode-1"
    await rig.player.run(decode, "self", prompt(70), TWENTY, decode=decode)  # handed over to itself: stays
    assert await rig.player.result("self") == expected_tokens(prompt(70), TWENTY)


async def test_blocks_go_over_while_the_next_step_computes(rig: Rig) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=32, mock__token_us=1_000)
    seen = await rig.sniff(decode)
    await rig.player.run(prefill, "r", prompt(200), TWENTY, decode=decode)
    assert await rig.player.result("r") == expected_tokens(prompt(200), TWENTY)
    kinds = [type(message) for message in seen]
    assert kinds[0] is Offer and kinds[-1] is Commit and kinds.count(Ready) == 6  # 32 tokens a step
    ready = [message for message in seen if isinstance(message, Ready)]
    assert [
        index for message in ready for index in range(message.first, message.first + len(message.blocks))
    ] == [*range(12)]


async def test_a_repeated_commit_is_answered_again_and_changes_nothing(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    seen = await rig.sniff(decode)
    await rig.player.run(prefill, "r", prompt(60), TWENTY, decode=decode)
    assert await rig.player.result("r") == expected_tokens(prompt(60), TWENTY)
    commit = next(message for message in seen if isinstance(message, Commit))
    answers = Codec(Committed, Refused)
    again = await rig.player.bus.call(decode.host.subject, commit, answers)
    assert isinstance(again, Committed) and again.bytes_pulled == 4 * 4_096
    commit.attempt = 7
    refused = await rig.player.bus.call(decode.host.subject, commit, answers)
    assert isinstance(refused, Refused) and refused.failure.code is Code.STALE


async def test_a_commit_sent_twice_while_blocks_are_on_their_way(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    seen, gate = await rig.sniff(decode), Gate(decode)
    await rig.player.run(prefill, "r", prompt(60), TWENTY, decode=decode)
    await gate.wait()
    await until(lambda: sum(isinstance(message, Commit) for message in seen) >= 2)  # asked again after 1 s
    gate.open()
    assert await rig.player.result("r") == expected_tokens(prompt(60), TWENTY)


async def test_a_run_sent_twice_runs_once(rig: Rig) -> None:
    prefill, decode = await rig.pair(mock__token_us=500)
    for _ in range(3):
        await rig.player.run(prefill, "r", prompt(100), TWENTY, decode=decode)
    assert await rig.player.result("r") == expected_tokens(prompt(100), TWENTY)
    assert {item.attempt for item in rig.player.items["r"]} == {0}


async def test_a_higher_attempt_frees_the_lower_one_and_a_lower_one_is_refused(rig: Rig) -> None:
    prefill, decode = await rig.pair(mock__step_us=2_000)
    long = SamplingParams(max_tokens=400)
    tokens = prompt(80)
    await rig.player.run(prefill, "r", tokens, long, decode=decode, attempt=1)
    await rig.player.tokens("r", 10)  # decode holds attempt 1
    other = await rig.add(Role.PREFILL)
    rig.player.lose = lambda item: item.attempt < 3
    await rig.player.run(other, "r", tokens, long, decode=decode, attempt=3)  # nobody cancelled attempt 1
    with pytest.raises(CallRejected) as refused:
        await rig.player.run(other, "r", tokens, long, attempt=2)
    assert refused.value.failure.code is Code.STALE
    rig.player.streams["r"].restart(3)
    assert await rig.player.result("r") == expected_tokens(tokens, long)


async def test_a_higher_attempt_takes_over_from_a_hand_off_under_way(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    gate = Gate(decode)
    tokens = prompt(80)
    await rig.player.run(prefill, "r", tokens, TWENTY, decode=decode)
    await gate.wait()
    await rig.player.run(decode, "r", tokens, TWENTY, attempt=1)
    gate.open()
    assert await rig.player.result("r") == expected_tokens(tokens, TWENTY)
    assert {item.attempt for item in rig.player.items["r"] if item.failure is None} == {1}


async def test_decode_pre_empted_after_the_hand_off(rig: Rig) -> None:
    prefill = await rig.add(Role.PREFILL)
    decode = await rig.add(Role.DECODE)
    held = decode.engine.borrow(decode.pool.num_blocks - 30)
    assert held is not None
    preempted = decode.count("_preempt")
    params = SamplingParams(max_tokens=100)
    for index in range(4):  # 4 x 5 blocks at first, 4 x 11 in the end
        await rig.player.run(prefill, f"r{index}", prompt(70, index), params, decode=decode)
    for index in range(4):
        assert await rig.player.result(f"r{index}") == expected_tokens(prompt(70, index), params)
    assert preempted
    decode.engine.give_back(held)


async def test_prefill_pre_empted_in_the_middle_of_a_hand_off(rig: Rig) -> None:
    """A higher class takes the blocks of a half-read prompt: its hand-off begins anew, with other blocks."""
    prefill = await rig.add(Role.PREFILL, max_batch_tokens=16, mock__token_us=1_000)
    decode = await rig.add(Role.DECODE)
    held = prefill.engine.borrow(prefill.pool.num_blocks - 32)
    assert held is not None
    seen, preempted = await rig.sniff(decode), prefill.count("_preempt")
    low, high = prompt(400, 1), prompt(200, 2)
    await rig.player.run(prefill, "low", low, TWENTY, decode=decode)
    await until(lambda: sum(isinstance(message, Ready) for message in seen) >= 5)
    await rig.player.run(prefill, "high", high, TWENTY, decode=decode, priority=5)
    assert await rig.player.result("high") == expected_tokens(high, TWENTY)
    assert await rig.player.result("low") == expected_tokens(low, TWENTY)
    assert preempted and not rig.player.failures
    assert sum(isinstance(message, Offer) and message.request == "low" for message in seen) == 2
    prefill.engine.give_back(held)


async def test_a_higher_class_takes_the_places_of_a_lower_one_between_two_steps(rig: Rig) -> None:
    prefill = await rig.add(Role.PREFILL)
    decode = await rig.add(Role.DECODE, max_sequences=2, mock__step_us=20_000)
    slow = SamplingParams(max_tokens=60)
    for index in range(2):
        await rig.player.run(prefill, f"low{index}", prompt(70, index), slow, decode=decode, priority=-1_000)
    await until(lambda: len(decode.engine.scheduler.running) == 2)
    for index in range(2):  # nearly always in the middle of a step
        await rig.player.run(prefill, f"high{index}", prompt(40, index), TWENTY, decode=decode)
    for index in range(2):
        assert await rig.player.result(f"high{index}") == expected_tokens(prompt(40, index), TWENTY)
    assert any(len(rig.player.output[f"low{index}"]) < 60 for index in range(2))  # they had to wait
    for index in range(2):
        assert await rig.player.result(f"low{index}") == expected_tokens(prompt(70, index), slow)
    assert not rig.player.failures
