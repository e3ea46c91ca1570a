"""The hand-off when something goes wrong: it is told, nothing is left over, a replay gives the same text."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from worker_rig import Gate, Node, Rig, prompt, running, until

from baton.bus.connection import CallRejected
from baton.bus.server import EmbeddedServer
from baton.config.settings import BusSettings
from baton.protocol.base import pack_tokens
from baton.protocol.codec import Codec
from baton.protocol.errors import Code
from baton.protocol.handoff import Abandon, Commit, Granted, Offer, Ready, Refused
from baton.protocol.liveness import Role
from baton.protocol.sampling import SamplingParams
from baton.protocol.work import Cancel
from baton.runner.mock import expected_tokens

TWENTY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=2_000)
TOKENS = prompt(200)


@pytest.fixture
async def rig(nats_server: BusSettings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(nats_server, tmp_path) as made:
        yield made


async def replay(rig: Rig, prefill: Node, decode: Node, *, attempt: int = 1) -> None:
    """The owner's answer to a failure: the next attempt, elsewhere; the text is the undisturbed one."""
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode, attempt=attempt)
    assert await rig.player.result("r") == expected_tokens(TOKENS, TWENTY)


# --- refusals ----------------------------------------------------------------------------------------


async def test_a_full_decode_worker_refuses_and_another_one_takes_it(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    held = decode.engine.borrow(decode.pool.num_blocks - 8)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    assert (await rig.player.failure("r")).code is Code.DECODE_FULL
    await replay(rig, prefill, await rig.add(Role.DECODE))
    decode.engine.give_back(held)


async def test_workers_of_different_fingerprints_refuse_each_other_loudly(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await rig.add(Role.PREFILL)
    decode = await rig.add(Role.DECODE, mock__block_bytes=8_192)
    await until(lambda: caplog.text.count("no KV blocks go between the two") == 2)  # each says it, at once
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    failure = await rig.player.failure("r")
    assert failure.code is Code.FINGERPRINT
    assert prefill.engine.config.fingerprint in failure.message
    assert decode.engine.config.fingerprint in failure.message
    await replay(rig, prefill, await rig.add(Role.DECODE))


async def test_workers_without_a_common_transport_say_so(rig: Rig) -> None:
    prefill = await rig.add(Role.PREFILL, transports=["tcp"])
    decode = await rig.add(Role.DECODE, transports=["shm"])
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    failure = await rig.player.failure("r")
    assert failure.code is Code.TRANSFER_FAILED and "no common transport" in failure.message
    await replay(rig, prefill, await rig.add(Role.DECODE))


async def test_a_peer_without_the_secret_gets_nothing(rig: Rig) -> None:
    prefill, decode = await rig.pair(transports=["tcp"])
    outbound = prefill.worker._outbound
    outbound._identity = dataclasses.replace(outbound._identity, secret="guessed")
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    failure = await rig.player.failure("r")
    assert failure.code is Code.TRANSFER_FAILED and "refused" in failure.message


# --- blocks that are not what was announced ----------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_block_overwritten_before_the_pull_fails_the_hand_off(rig: Rig, transport: str) -> None:
    prefill, decode = await rig.pair(transports=[transport])
    seen, gate = await rig.sniff(decode), Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await gate.wait()
    ready = next(message for message in seen if isinstance(message, Ready))
    prefill.pool.view(ready.blocks[1].slot)[7] ^= 1
    gate.open()
    failure = await rig.player.failure("r")
    assert failure.code is Code.TRANSFER_FAILED and "checksum" in failure.message
    assert not rig.player.output["r"]
    other = await rig.add(Role.PREFILL)  # the first one's cache is damaged by this test
    await replay(rig, other, decode)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_block_given_to_another_sequence_is_stale(rig: Rig, transport: str) -> None:
    prefill, decode = await rig.pair(transports=[transport])
    seen, gate = await rig.sniff(decode), Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await gate.wait()
    ready = next(message for message in seen if isinstance(message, Ready))
    prefill.pool.generations[ready.blocks[0].slot] += 1
    gate.open()
    failure = await rig.player.failure("r")
    assert failure.code is Code.TRANSFER_FAILED and "stale" in failure.message
    await replay(rig, await rig.add(Role.PREFILL), decode)


async def test_a_lost_announcement_is_noticed_at_the_commit(rig: Rig) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=64, mock__token_us=200)
    inbound: Any = decode.worker._inbound
    ready, dropped = inbound.ready, list[Ready]()

    def lossy(message: Ready) -> None:
        if dropped:
            ready(message)
        else:
            dropped.append(message)

    inbound.ready = lossy
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    failure = await rig.player.failure("r")
    assert failure.code is Code.TRANSFER_FAILED and "never announced" in failure.message
    await replay(rig, prefill, decode)


# --- somebody dies -----------------------------------------------------------------------------------


async def test_the_sender_is_killed_in_the_middle(rig: Rig) -> None:
    prefill, decode = await rig.pair(transports=["tcp"], max_batch_tokens=32, mock__token_us=1_000)
    seen = await rig.sniff(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await until(lambda: any(isinstance(message, Ready) for message in seen))
    await prefill.kill()
    assert len(decode.worker._inbound) == 1
    await rig.clean(timeout_s=5.0)  # heartbeats stop for 3 s
    await replay(rig, await rig.add(Role.PREFILL), decode)


async def test_a_sender_that_comes_back_frees_what_the_dead_one_left(rig: Rig) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=32, mock__token_us=1_000)
    seen = await rig.sniff(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await until(lambda: any(isinstance(message, Ready) for message in seen))
    await prefill.kill()
    began = time.monotonic()
    again = await rig.add(Role.PREFILL, name=prefill.host.id)
    await rig.clean(timeout_s=2.5)
    assert time.monotonic() - began < 2.5  # its new epoch says that the old one is over
    await replay(rig, again, decode)


async def test_the_receiver_is_killed_in_the_middle(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    gate = Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await gate.wait()
    await decode.kill()
    failure = await rig.player.failure("r")
    assert failure.code is Code.WORKER_LOST
    await replay(rig, prefill, await rig.add(Role.DECODE))


async def test_the_receiver_is_killed_after_the_commit(rig: Rig) -> None:
    prefill, decode = await rig.pair(mock__step_us=2_000)
    long = SamplingParams(max_tokens=300)
    await rig.player.run(prefill, "r", TOKENS, long, decode=decode)
    await rig.player.tokens("r", 20)
    await decode.kill()
    await rig.clean()  # prefill holds nothing since the commit
    await rig.player.run(prefill, "r", TOKENS, long, decode=await rig.add(Role.DECODE), attempt=1)
    assert await rig.player.result("r") == expected_tokens(TOKENS, long)


@pytest.mark.parametrize("lease_ms", [400, 30_000])
async def test_a_silent_sender_loses_its_lease_and_an_unknown_one_sooner(rig: Rig, lease_ms: int) -> None:
    _, decode = await rig.pair(lease_ms=lease_ms)
    offer = await fake_offer(rig, decode)
    answer = await rig.player.bus.call(decode.host.subject, offer, Codec(Granted, Refused))
    assert answer == Granted(hit_blocks=0)
    assert decode.engine.pool.used == 13
    await rig.clean(timeout_s=1.2 if lease_ms == 400 else 3.0)


async def test_a_silent_receiver_loses_the_blocks_and_the_owner_is_told(rig: Rig) -> None:
    prefill, decode = await rig.pair(lease_ms=1_500)
    gate = Gate(decode)
    receiver: Any = decode.worker._inbound._receiver
    receiver._renew = _nothing
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    failure = await rig.player.failure("r")
    assert failure.code is Code.TRANSFER_FAILED and "in time" in failure.message
    await rig.clean()
    gate.open()
    await replay(rig, prefill, decode)


async def test_a_pull_that_takes_long_keeps_the_lease(rig: Rig) -> None:
    prefill, decode = await rig.pair(lease_ms=1_500)
    gate = Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await gate.wait()
    await asyncio.sleep(3.0)  # two leases
    gate.open()
    assert await rig.player.result("r") == expected_tokens(TOKENS, TWENTY)


async def _nothing(_: object) -> None:
    return


async def fake_offer(rig: Rig, decode: Node) -> Offer:
    """An offer of a sender that will say no more."""
    info = decode.host.beat.worker
    assert info is not None
    return Offer(
        request="r",
        attempt=0,
        sender="nobody",
        epoch=1,
        subject=rig.player.subject,
        address=info.address,
        secret="",
        fingerprint=info.fingerprint,
        tokens=pack_tokens(TOKENS),
        max_new_tokens=20,
    )


# --- the owner changes its mind, or dies -------------------------------------------------------------

Stage = Callable[[Rig, Node, Node], Awaitable[None]]


async def queued(rig: Rig, prefill: Node, decode: Node) -> None:
    blocker = prefill.engine.borrow(prefill.pool.num_blocks - 4)
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    await until(lambda: prefill.engine.load().waiting == 1)
    prefill.engine.give_back(blocker)


async def prefilling(rig: Rig, prefill: Node, decode: Node) -> None:
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    await until(lambda: prefill.engine.load().running == 1)


async def offered(rig: Rig, prefill: Node, decode: Node) -> None:
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    await until(lambda: len(decode.worker._inbound) == 1)


async def transferring(rig: Rig, prefill: Node, decode: Node) -> None:
    gate = Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    await gate.wait()


async def committing(rig: Rig, prefill: Node, decode: Node) -> None:
    seen, gate = await rig.sniff(decode), Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    await gate.wait()
    await until(lambda: any(isinstance(message, Commit) for message in seen))


async def decoding(rig: Rig, prefill: Node, decode: Node) -> None:
    await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    await rig.player.tokens("r", 5)


STAGES = (queued, prefilling, offered, transferring, committing, decoding)


@pytest.mark.parametrize("order", ["prefill first", "decode first", "prefill only"])
@pytest.mark.parametrize("stage", STAGES)
async def test_cancel_frees_everything(rig: Rig, stage: Stage, order: str) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=64, mock__token_us=500)
    await stage(rig, prefill, decode)
    if order == "prefill only" and stage is not decoding:  # it passes the word on
        nodes = [prefill]
    else:
        nodes = [decode, prefill] if order == "decode first" else [prefill, decode]
    for _ in range(2):  # idempotent
        await rig.player.cancel("r", *nodes)
    await rig.clean(timeout_s=1.0)
    with pytest.raises(CallRejected) as refused:  # a tombstone
        await rig.player.run(prefill, "r", TOKENS, LONG, decode=decode)
    assert refused.value.failure.code is Code.STALE
    assert not rig.player.failures


async def test_cancel_before_the_run_and_before_the_offer(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    await rig.player.cancel("r", prefill)
    with pytest.raises(CallRejected):
        await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await rig.player.cancel("r", decode, attempt=1)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode, attempt=1)
    assert (await rig.player.failure("r")).code is Code.STALE
    await replay(rig, prefill, decode, attempt=2)


async def test_an_offer_and_its_cancel_in_one_breath_leave_nothing(rig: Rig) -> None:
    _, decode = await rig.pair()
    offer = await fake_offer(rig, decode)
    bus = rig.player.bus
    for attempt in range(50):
        offer.attempt = attempt
        await bus.publish(decode.host.subject, offer, reply="_INBOX.nobody")
        await bus.publish(decode.host.subject, Cancel(request="r", attempt=attempt))
        offer.request = f"a{attempt}"
        await bus.publish(decode.host.subject, offer, reply="_INBOX.nobody")
        await bus.publish(decode.host.subject, Abandon(request=offer.request, attempt=attempt))
        offer.request = "r"
    await rig.clean()


async def test_two_hundred_cancelled_at_random_moments(rig: Rig) -> None:
    """Each of them twice, as a client's library that loses patience does it. No task is left either."""
    prefill, decode = await rig.pair(kv_memory_mb=2, mock__token_us=20)
    await rig.player.run(prefill, "first", prompt(40, 999), SamplingParams(max_tokens=4), decode=decode)
    await rig.player.result("first")
    await rig.clean()
    tasks = len(asyncio.all_tasks())

    async def one(index: int) -> None:
        await asyncio.sleep(index * 0.004)
        name = f"r{index}"
        try:
            await rig.player.run(prefill, name, prompt(20 + index * 3, index), LONG, decode=decode)
        except CallRejected:
            return
        await asyncio.sleep((index * 37 % 100) / 400)
        await rig.player.cancel(name, prefill, decode)
        await asyncio.sleep(0.01)
        await rig.player.cancel(name, decode, prefill)

    await asyncio.gather(*(one(index) for index in range(200)))
    await rig.clean(timeout_s=3.0)
    await until(lambda: len(asyncio.all_tasks()) <= tasks, 3.0, lambda: asyncio.all_tasks())


@pytest.mark.parametrize("stage", [prefilling, transferring, decoding])
async def test_a_tokenizer_that_dies_frees_everything(rig: Rig, stage: Stage) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=64, mock__token_us=500)
    await stage(rig, prefill, decode)
    rig.player._inbox.close()  # nobody takes tokens there any more: the server's 503 says so
    if stage is decoding:
        await rig.clean(timeout_s=1.5)
    else:  # nothing is sent to it yet; the word of its end comes with its heartbeats
        for node in (prefill, decode):
            node.worker._tokenizer_gone(rig.player.subject)
        await rig.clean(timeout_s=1.5)


@pytest.mark.parametrize("stage", [queued, prefilling, transferring, decoding])
async def test_a_deadline_frees_everything(rig: Rig, stage: Stage) -> None:
    prefill, decode = await rig.pair(max_batch_tokens=64, mock__token_us=500)
    player: Any = rig.player
    run = player.run

    async def soon(*args: Any, **options: Any) -> None:
        await run(*args, **options, deadline_ms=700)

    player.run = soon
    await stage(rig, prefill, decode)
    await rig.clean(timeout_s=2.0)


# --- tokens that are lost ----------------------------------------------------------------------------


async def test_lost_tokens_come_again(rig: Rig) -> None:
    prefill, decode = await rig.pair(mock__step_us=1_000)
    params = SamplingParams(max_tokens=100, logprobs=1)
    await rig.player.run(prefill, "r", TOKENS, params, decode=decode)
    await rig.player.tokens("r", 10)
    rig.player.lose = lambda item: True
    await asyncio.sleep(0.03)
    rig.player.lose = lambda item: False
    await asyncio.sleep(0.03)
    await rig.player.resume(decode, "r")
    assert await rig.player.result("r") == expected_tokens(TOKENS, params)
    assert len(rig.player.logprobs["r"]) == 100


async def test_a_lost_end_comes_again_until_it_is_acknowledged(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    rig.player.lose = lambda item: True
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await until(lambda: bool(decode.worker._out._ended))
    rig.player.lose = lambda item: False
    await rig.player.resume(decode, "r")
    assert await rig.player.result("r") == expected_tokens(TOKENS, TWENTY)
    await rig.player.ended(decode, "r")
    await until(lambda: not decode.worker._out._ended)
    with pytest.raises(CallRejected) as refused:
        await rig.player.resume(decode, "r")
    assert refused.value.failure.code is Code.STALE


async def test_resume_during_a_hand_off_is_answered_by_both(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    gate = Gate(decode)
    await rig.player.run(prefill, "r", TOKENS, TWENTY, decode=decode)
    await gate.wait()
    await rig.player.resume(prefill, "r")
    await rig.player.resume(decode, "r")
    gate.open()
    assert await rig.player.result("r") == expected_tokens(TOKENS, TWENTY)


# --- the bus goes away -------------------------------------------------------------------------------


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[tuple[Rig, EmbeddedServer]]:
    """A rig with a NATS server of its own, which a test may stop."""
    server = EmbeddedServer()
    url = await asyncio.to_thread(server.start, tmp_path / "nats", user="u", password="p")
    (tmp_path / "shm").mkdir()
    try:
        async with running(BusSettings(url=url, user="u", password="p"), tmp_path / "shm") as rig:
            yield rig, server
    finally:
        await asyncio.to_thread(server.stop)


async def outage(server: EmbeddedServer, seconds: float) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(server.restart)


async def test_the_bus_away_for_a_second_is_a_pause(own: tuple[Rig, EmbeddedServer]) -> None:
    rig, server = own
    prefill, decode = await rig.pair(mock__step_us=5_000)
    params = SamplingParams(max_tokens=400)
    await rig.player.run(prefill, "r", TOKENS, params, decode=decode)
    await rig.player.tokens("r", 20)
    await outage(server, 0.8)
    await asyncio.wait_for(rig.player.bus.up.wait(), 5)
    await asyncio.wait_for(decode.bus.up.wait(), 5)
    await rig.player.resume(decode, "r")
    assert await rig.player.result("r") == expected_tokens(TOKENS, params)
    assert {item.attempt for item in rig.player.items["r"]} == {0}


@pytest.mark.parametrize("stage", [transferring, decoding])
async def test_the_bus_away_for_longer_frees_everything(
    own: tuple[Rig, EmbeddedServer], stage: Stage
) -> None:
    rig, server = own
    prefill, decode = await rig.pair(mock__step_us=5_000)
    await stage(rig, prefill, decode)
    await asyncio.to_thread(server.stop)
    await rig.clean(timeout_s=4.0)
    await asyncio.to_thread(server.restart)
    for node in (prefill, decode):
        await asyncio.wait_for(node.bus.up.wait(), 5)
    await asyncio.wait_for(rig.player.bus.up.wait(), 5)
    other = await rig.add(Role.DECODE)
    await rig.player.run(prefill, "after", TOKENS, TWENTY, decode=other)
    assert await rig.player.result("after") == expected_tokens(TOKENS, TWENTY)
