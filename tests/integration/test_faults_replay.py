"""Replays: the owner of a request keeps it on workers until it ends, and its text is the undisturbed one.

Router, tokenizer and workers are real, each with its own connection to the bus; the test plays the gateway.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from worker_rig import Node, Process, Rig, prompt, running, until

from baton.bus.directory import Directory
from baton.bus.inbox import Inbox
from baton.protocol import subjects
from baton.protocol.base import pack_tokens
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, RequestError
from baton.protocol.liveness import Role
from baton.protocol.placing import Target
from baton.protocol.request import Accepted, Generate, Rejected, TextBatch, TextDelta
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton_services.gateway.owners import Owners
from baton_services.router.service import RouterService
from baton_services.tokenizer import dispatch, vigil
from baton_services.tokenizer.service import TokenizerService

TOKENS = prompt(120)
LONG = SamplingParams(max_tokens=200)
SLOW = {"mock__step_us": 4_000}


class Gateway:
    """Sends requests to one tokenizer and gathers their text."""

    def __init__(self, rig: Rig, tokenizer: Process) -> None:
        self.tokenizer = tokenizer
        self.bus = rig.player.bus
        self.subject = subjects.text("test", time.time_ns())
        self.text: dict[str, str] = {}
        self.last: dict[str, TextDelta] = {}

    async def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._listen(await self.bus.inbox(self.subject, TextBatch)))

    async def _listen(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            if delivery.message.epoch != self.tokenizer.host.epoch:
                continue  # of one given up
            for delta in delivery.message.deltas:
                assert delta.start == len(self.text.setdefault(delta.request, ""))
                self.text[delta.request] += delta.text
                if delta.finish or delta.failure is not None:
                    assert delta.request not in self.last, "every request ends once"
                    self.last[delta.request] = delta

    async def send(self, params: SamplingParams = LONG, tokens: list[int] = TOKENS, **fields: Any) -> str:
        name = uuid.uuid4().hex
        self.text[name] = ""
        generate = Generate(
            request=name,
            model="mock",
            reply_to=self.subject,
            prompt_tokens=pack_tokens(tokens),
            sampling=params,
            **fields,
        )
        await self.bus.call(self.tokenizer.host.subject, generate, Codec(Accepted, Rejected), timeout_s=2.0)
        return name

    async def some(self, name: str, characters: int = 10) -> None:
        await until(lambda: len(self.text[name]) >= characters, 5.0, lambda: self.last.get(name))

    async def ended(self, name: str, timeout_s: float = 10.0) -> TextDelta:
        await until(lambda: name in self.last, timeout_s, lambda: f"at {len(self.text[name])} characters")
        return self.last[name]

    async def right(self, name: str, params: SamplingParams = LONG, tokens: list[int] = TOKENS) -> TextDelta:
        """It ended well, with the undisturbed text and the right usage."""
        last = await self.ended(name)
        assert last.failure is None, last.failure
        assert self.text[name] == bytes(expected_tokens(tokens, params)).decode()
        assert last.usage is not None
        assert last.usage.prompt_tokens == len(tokens)
        assert last.usage.completion_tokens == params.max_tokens
        return last


class Cluster:
    def __init__(self, rig: Rig, gateway: Gateway, tokenizer: Process) -> None:
        self.rig = rig
        self.gateway = gateway
        self.tokenizer = tokenizer

    def live(self, name: str) -> Any:
        return self.tokenizer.service._live[name]

    async def ready(self, count: int) -> None:
        """The router knows so many workers and the tokenizer may route."""
        router = next(other for other in self.rig.others if other.host.role is Role.ROUTER)
        await until(lambda: len(router.service._view.workers) >= count, 5.0)
        await until(lambda: self.tokenizer.host.beat.routable, 5.0)

    def holder(self, name: str) -> Node:
        """The worker that sends its tokens."""
        return next(node for node in self.rig.nodes if node.host.id == self.live(name).holder)


@pytest.fixture
async def cluster(nats_server: Any, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(nats_server, tmp_path) as rig:
        await rig.serve(Role.ROUTER, RouterService)
        tokenizer = await rig.serve(Role.TOKENIZER, TokenizerService, tokenizer__max_attempts=2)
        gateway = Gateway(rig, tokenizer)
        listening = await gateway.start()
        yield Cluster(rig, gateway, tokenizer)
        listening.cancel()


async def test_a_request_sent_twice_runs_once_and_harms_nobody(cluster: Cluster) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        await cluster.rig.add(role, **SLOW)
    await cluster.ready(2)
    name, other = await cluster.gateway.send(), await cluster.gateway.send(tokens=prompt(80, 1))
    live = cluster.live(name)
    for _ in range(3):
        await cluster.gateway.bus.call(
            cluster.tokenizer.host.subject, live.generate, Codec(Accepted, Rejected), timeout_s=2.0
        )
    assert cluster.live(name) is live
    await cluster.gateway.right(name)
    await cluster.gateway.right(other, tokens=prompt(80, 1))


async def test_a_lost_decode_worker_costs_a_pause_and_no_attempt(cluster: Cluster) -> None:
    for role in (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE):
        await cluster.rig.add(role, **SLOW)
    await cluster.ready(4)
    name = await cluster.gateway.send()
    for at in (10, 60):  # two losses, though one failure would be the last
        await cluster.gateway.some(name, at)
        await cluster.holder(name).kill()
        await until(lambda: cluster.live(name).holder == "", 3.0)
    assert cluster.live(name).failures == 0
    last = await cluster.gateway.right(name)
    assert last.timing is not None


async def test_a_replay_of_a_sampled_penalised_request_with_logprobs(cluster: Cluster) -> None:
    params = SamplingParams(
        max_tokens=100, temperature=0.9, seed=3, presence_penalty=0.5, repetition_penalty=1.1, logprobs=2
    )
    for role in (Role.PREFILL, Role.DECODE, Role.DECODE):
        await cluster.rig.add(role, **SLOW)
    await cluster.ready(3)
    name = await cluster.gateway.send(params)
    await cluster.gateway.some(name, 30)
    await cluster.holder(name).kill()
    await until(lambda: cluster.live(name).attempt >= 1, 3.0)
    await cluster.gateway.right(name, params)


async def test_a_lost_prefill_worker(cluster: Cluster) -> None:
    slow = {"mock__token_us": 5_000, "max_batch_tokens": 16}
    first = await cluster.rig.add(Role.PREFILL, **slow)
    await cluster.rig.add(Role.DECODE)
    await cluster.ready(2)
    name = await cluster.gateway.send()
    await until(lambda: first.engine.load().running == 1)
    second = await cluster.rig.add(Role.PREFILL)
    await first.kill()
    last = await cluster.gateway.right(name)
    assert last.timing is not None and last.timing.prefill_worker == second.host.id


@pytest.mark.parametrize("left", [Role.PREFILL, Role.DECODE])
async def test_a_role_without_workers_is_served_by_the_other(cluster: Cluster, left: Role) -> None:
    await cluster.rig.add(left)
    await cluster.ready(1)
    await cluster.gateway.right(await cluster.gateway.send())


async def test_with_no_worker_at_all_a_request_waits_for_one_to_come_back(cluster: Cluster) -> None:
    node = await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    await node.kill()
    await asyncio.sleep(1.5)
    assert name not in cluster.gateway.last
    await cluster.rig.add(Role.DECODE, name=node.host.id)
    await cluster.gateway.right(name)


async def test_a_request_that_fails_of_itself_ends_after_its_attempts(cluster: Cluster) -> None:
    bad = prompt(50, 9)
    for role in (Role.PREFILL, Role.DECODE):
        break_steps(await cluster.rig.add(role), bad)
    await cluster.ready(2)
    name = await cluster.gateway.send(tokens=bad)
    last = await cluster.gateway.ended(name)
    assert last.failure is not None and last.failure.code is Code.INTERNAL
    await cluster.gateway.right(await cluster.gateway.send())  # the next one is served


def break_steps(node: Node, tokens: list[int]) -> None:
    """Steps that read this prompt fail at this worker."""
    runner: Any = node.worker._runner
    execute = runner.execute

    def breaking(plan: Any) -> Any:
        if any(part.start == 0 and part.tokens[:5] == tokens[:5] for part in plan.slices):
            raise RuntimeError("a test breaks this step")
        return execute(plan)

    runner.execute = breaking


async def test_a_request_that_kills_every_worker_is_given_up(cluster: Cluster) -> None:
    """Not by dying workers here: what counts them, on a real bus."""
    await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    live, dispatcher = cluster.live(name), cluster.tokenizer.service._dispatcher
    nobody = Target(id="nobody", epoch=1, subject="baton.v1._.ctl.decode.nobody.1")
    for _ in range(dispatch.LOSSES):
        await dispatcher.lost(live, nobody, at_work=False)  # what it only waited for, it has not killed
        await dispatcher.lost(live, nobody, at_work=True)
    with pytest.raises(RequestError) as given_up:
        await dispatcher.lost(live, nobody, at_work=True)
    assert given_up.value.failure.code is Code.WORKER_LOST
    await cluster.tokenizer.service._end_with(live, given_up.value.failure)
    assert (await cluster.gateway.ended(name)).failure is not None


async def test_a_request_that_its_worker_has_forgotten_is_replayed_there(cluster: Cluster) -> None:
    node = await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    jobs = node.worker._jobs
    job = jobs.get(name)
    assert job is not None
    await jobs.drop(job, "a test drops it without a word")
    await cluster.gateway.right(name)


async def test_a_request_that_stands_still_is_replayed_elsewhere(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vigil, "STALL_S", 1.0)
    first = await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    first.engine.scheduler.schedule = list  # alive, and answers, but does nothing
    second = await cluster.rig.add(Role.DECODE)
    last = await cluster.gateway.right(name)
    assert last.timing is not None and last.timing.decode_worker == second.host.id


async def test_a_full_decode_worker_is_not_asked_again_at_once(cluster: Cluster) -> None:
    await cluster.rig.add(Role.PREFILL)
    full = await cluster.rig.add(Role.DECODE)
    await cluster.ready(2)
    held = full.engine.borrow(full.pool.num_blocks - 4)  # the router does not know it yet
    name = await cluster.gateway.send()
    await asyncio.sleep(1.5)
    assert cluster.live(name).attempt < 8  # the router holds it back, or each refusal costs a longer pause
    await cluster.rig.add(Role.DECODE)
    last = await cluster.gateway.right(name)
    assert last.failure is None
    full.engine.give_back(held)


async def test_a_draining_worker_is_left_by_moves_not_replays(cluster: Cluster) -> None:
    prefill, source = await cluster.rig.add(Role.PREFILL), await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(2)
    names = [await cluster.gateway.send(tokens=prompt(60 + at, at)) for at in range(5)]
    for name in names:
        await cluster.gateway.some(name)
    target = await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(3)
    began = time.monotonic()
    await source.drain(5.0)
    assert time.monotonic() - began < 4.0
    for at, name in enumerate(names):
        last = await cluster.gateway.right(name, tokens=prompt(60 + at, at))
        assert last.timing is not None and last.timing.decode_worker == target.host.id
        assert last.timing.prefill_worker == prefill.host.id  # nobody read a prompt again
    assert prefill.worker._figures._metrics.computed_tokens._value.get() == sum(60 + at for at in range(5))


async def test_a_tokenizer_that_stops_says_so_for_each_request(cluster: Cluster) -> None:
    await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    await cluster.tokenizer.drain(0.2)
    last = await cluster.gateway.ended(name)
    assert last.failure is not None and last.failure.code is Code.DRAINING  # the gateway sends it elsewhere
    await cluster.rig.clean()


async def test_a_second_owner_takes_over_what_the_first_one_left_at_the_workers(cluster: Cluster) -> None:
    """The first tokenizer died without a word: its attempt still runs where the second one sends its own."""
    node = await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    second = await cluster.rig.serve(Role.TOKENIZER, TokenizerService)
    await until(lambda: second.host.beat.routable, 5.0)
    generate = cluster.live(name).generate
    generate.resend += 1
    cluster.tokenizer.service._forget(cluster.live(name))
    cluster.gateway.tokenizer, cluster.gateway.text[name] = second, ""  # it begins again
    await cluster.gateway.bus.call(second.host.subject, generate, Codec(Accepted, Rejected), timeout_s=2.0)
    await cluster.gateway.right(name)
    assert node.failure is None


async def test_the_dead_are_excluded_at_the_first_failed_contact(cluster: Cluster) -> None:
    node = await cluster.rig.add(Role.DECODE, **SLOW)
    await cluster.ready(1)
    directory: Directory = cluster.tokenizer.host.directory
    name = await cluster.gateway.send()
    await cluster.gateway.some(name)
    began = time.monotonic()
    await node.kill()
    await until(lambda: not directory.live(Role.DECODE), 3.0)
    assert time.monotonic() - began < 2.0  # heartbeats would take three seconds
    await cluster.rig.add(Role.DECODE)
    await cluster.gateway.right(name)


async def test_a_gateway_finds_a_dead_tokenizer_by_asking_it(cluster: Cluster) -> None:
    lost: list[str] = []
    owners = Owners(cluster.rig.player.bus, lambda owner: lost.append(owner.id))
    tokenizer = cluster.tokenizer.target
    owned = {(tokenizer.id, tokenizer.epoch): (tokenizer, "some request")}
    for _ in range(12):  # silent for well over the time after which it is asked: it answers
        await owners.look(owned)
        await asyncio.sleep(0.1)
    assert not lost
    await cluster.tokenizer.kill()
    await asyncio.sleep(1.0)
    await owners.look(owned)
    assert lost == [tokenizer.id]
