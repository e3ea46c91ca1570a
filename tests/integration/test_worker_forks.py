"""The choices of one prompt at real workers: one `Run`, one prefill, one transfer, then each on its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from worker_rig import BLOCK, Gate, Node, Rig, prompt, running, until

from baton.bus.connection import CallRejected
from baton.config.settings import BusSettings
from baton.protocol.errors import Code
from baton.protocol.handoff import Commit, Offer, Ready
from baton.protocol.liveness import Role
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens

TOKENS = prompt(100)
PARAMS = SamplingParams(max_tokens=30, temperature=1.0, seed=7)
LONG = SamplingParams(max_tokens=300, temperature=1.0, seed=7)


@pytest.fixture
async def rig(nats_server: BusSettings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(nats_server, tmp_path) as made:
        yield made


def names(count: int, *, without: tuple[int, ...] = ()) -> list[tuple[int, str]]:
    return [(choice, f"r.{choice}" if choice else "r") for choice in range(count) if choice not in without]


async def check(rig: Rig, each: list[tuple[int, str]], tokens: list[int], params: SamplingParams) -> None:
    for choice, name in each:
        assert await rig.player.result(name) == expected_tokens(tokens, params, choice=choice), name


def computed(node: Node) -> float:
    """Tokens that a worker has computed."""
    value = node.host.registry.get_sample_value("baton_computed_tokens_total")
    assert value is not None
    return value


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 100])
async def test_one_transfer_for_all(rig: Rig, length: int) -> None:
    prefill, decode = await rig.pair(prefix_cache=False)
    seen, tokens = await rig.sniff(decode), prompt(length)
    await rig.player.run(prefill, "r", tokens, PARAMS, decode=decode, choices=8)
    await check(rig, names(8), tokens, PARAMS)
    assert computed(prefill) == length and computed(decode) == 8 * 30 - 1
    assert len([message for message in seen if isinstance(message, Offer)]) == 1
    assert sum(len(message.blocks) for message in seen if isinstance(message, Ready)) == length // BLOCK
    for choice, name in names(8):
        assert rig.player.senders[name] == {"decode-1"}
        timing = rig.player.streams[name].timing
        assert timing is not None and timing.prefill_worker == "prefill-0", choice


async def test_without_a_hand_off(rig: Rig) -> None:
    node = await rig.add(Role.DECODE)
    await rig.player.run(node, "r", TOKENS, PARAMS, choices=5)
    await check(rig, names(5), TOKENS, PARAMS)
    assert computed(node) == 100 + 5 * 30 - 1


async def test_answers_of_one_token_end_at_prefill(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    seen = await rig.sniff(decode)
    one = SamplingParams(max_tokens=1, temperature=1.0, seed=7)
    await rig.player.run(prefill, "r", TOKENS, one, decode=decode, choices=6)
    await check(rig, names(6), TOKENS, one)
    assert computed(prefill) == 105 and not seen


async def test_a_first_token_that_ends_the_first_choice(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    firsts = [expected_tokens(TOKENS, PARAMS, choice=choice)[0] for choice in range(6)]
    stop = SamplingParams(max_tokens=30, temperature=1.0, seed=7, stop_token_ids=[firsts[0]])
    assert len(set(firsts)) > 1
    await rig.player.run(prefill, "r", TOKENS, stop, decode=decode, choices=6)
    await check(rig, names(6), TOKENS, stop)
    assert computed(prefill) == 105


async def test_few_places_at_decode(rig: Rig) -> None:
    prefill, decode = await rig.add(Role.PREFILL), await rig.add(Role.DECODE, max_sequences=3)
    await rig.player.run(prefill, "r", TOKENS, PARAMS, decode=decode, choices=9)
    await check(rig, names(9), TOKENS, PARAMS)


async def test_a_choice_is_cancelled_while_it_runs(rig: Rig) -> None:
    prefill, decode = await rig.pair(mock__step_us=2_000)
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode, choices=4)
    for _, name in names(4):
        await rig.player.tokens(name, 5)
    await rig.player.cancel("r.2", prefill, decode)
    await rig.player.cancel("r", prefill, decode)
    await check(rig, names(4, without=(0, 2)), TOKENS, LONG)
    assert len(rig.player.output["r.2"]) < 300 and len(rig.player.output["r"]) < 300


async def test_a_choice_is_cancelled_before_it_begins(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    gate = Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, PARAMS, decode=decode, choices=4)
    await gate.reached.wait()
    await rig.player.resume(prefill, "r.3")  # it is known, though nothing of it is made yet
    await rig.player.cancel("r.1", prefill, decode)
    await rig.player.cancel("r.3", decode)  # which will refuse it when it comes
    with pytest.raises(CallRejected):
        await rig.player.resume(prefill, "r.1")
    gate._open.set()
    await check(rig, names(4, without=(1, 3)), TOKENS, PARAMS)
    assert not rig.player.output["r.1"] and not rig.player.output["r.3"]


async def test_a_cancelled_run_begins_no_choices(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    gate = Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, PARAMS, decode=decode, choices=4)
    await gate.reached.wait()
    await rig.player.cancel("r", prefill, decode)
    gate._open.set()
    await rig.clean()
    assert not any(rig.player.output[name] for _, name in names(4))


async def test_what_fails_is_told_of_each_choice(rig: Rig) -> None:
    prefill, decode = await rig.add(Role.PREFILL), await rig.add(Role.DECODE, kv_memory_mb=1)
    await rig.player.run(decode, "busy", prompt(3_000, 1), SamplingParams(max_tokens=900))
    await rig.player.tokens("busy", 1)
    await rig.player.run(prefill, "r", prompt(2_000, 2), PARAMS, decode=decode, choices=3)
    for _, name in names(3):
        assert (await rig.player.failure(name)).code in (Code.DECODE_FULL, Code.CONTEXT_LENGTH)
    await rig.player.cancel("busy", decode)


async def test_a_lost_receiver_fails_each_choice(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    other, gate = await rig.add(Role.DECODE), Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, PARAMS, decode=decode, choices=3)
    await gate.reached.wait()
    gate._open.set()
    await decode.kill()
    for choice, name in names(3):
        assert (await rig.player.failure(name)).code in (Code.WORKER_LOST, Code.TRANSFER_FAILED)
        # As its owner does it: each is replayed by itself.
        rig.player.streams[name].restart(1)
        assert choice or name == "r"
    await rig.player.run(prefill, "r", TOKENS, PARAMS, decode=other, attempt=1, choices=3)
    await check(rig, names(3), TOKENS, PARAMS)


async def test_choices_move_one_by_one(rig: Rig) -> None:
    source, target = await rig.add(Role.DECODE, mock__step_us=2_000), await rig.add(Role.DECODE)
    await rig.player.run(source, "r", TOKENS, LONG, choices=3)
    for _, name in names(3):
        await rig.player.tokens(name, 5)
    seen = await rig.sniff(target)
    for _, name in names(3):
        await rig.player.move(source, target, name, attempt=0, successor=1)
    await check(rig, names(3), TOKENS, LONG)
    commits = [message for message in seen if isinstance(message, Commit)]
    assert len({message.request for message in commits}) == 3
    for _, name in names(3):
        assert rig.player.senders[name] == {source.host.id, target.host.id}


async def test_a_choice_without_room_in_the_queue_is_told(rig: Rig) -> None:
    node = await rig.add(Role.DECODE, max_sequences=2, max_waiting=1)
    await rig.player.run(node, "r", TOKENS, PARAMS, choices=5)
    await until(lambda: len(rig.player.failures) == 2, 5.0, lambda: rig.player.failures)
    assert all(told[0].code is Code.OVERLOADED for told in rig.player.failures.values())
    done = [(choice, name) for choice, name in names(5) if name not in rig.player.failures]
    await check(rig, done, TOKENS, PARAMS)
