"""Log-probabilities of a prompt through router, tokenizer and workers, when messages or workers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_faults_replay import Cluster, Gateway
from worker_rig import Node, prompt, running, until

from baton.bus.inbox import Inbox
from baton.protocol.liveness import Role
from baton.protocol.request import TextBatch, TokenText
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_scores, expected_tokens
from baton_services.router.service import RouterService
from baton_services.tokenizer.service import TokenizerService

TOKENS = prompt(200, 3)
SLOW = {"mock__token_us": 2_000, "max_batch_tokens": 32}


class Scored(Gateway):
    """Gathers the tokens as well."""

    def __init__(self, rig: Any, tokenizer: Any) -> None:
        super().__init__(rig, tokenizer)
        self.tokens: dict[str, list[TokenText]] = {}

    async def _listen(self, inbox: Inbox) -> None:
        same = await self.bus.inbox(self.subject, TextBatch)
        await asyncio.gather(super()._listen(inbox), self._gather(same))

    async def _gather(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            for delta in delivery.message.deltas:
                told = self.tokens.setdefault(delta.request, [])
                assert delta.token_start == len(told)
                told += delta.tokens

    async def right(self, name: str, params: SamplingParams, tokens: list[int] = TOKENS) -> Any:
        last = await self.ended(name, 20.0)
        assert last.failure is None, last.failure
        await until(lambda: len(self.tokens[name]) == len(tokens) + params.max_tokens)
        assert self.text[name] == bytes(tokens + expected_tokens(tokens, params)).decode()
        wanted, told = expected_scores(tokens, params.prompt_logprobs), self.tokens[name]
        assert len(told) == len(tokens) + params.max_tokens
        assert told[0].logprob is None
        assert [token.logprob for token in told[1 : len(tokens)]] == wanted.chosen.tolist()
        assert b"".join(token.raw for token in told).decode() == self.text[name]
        return last


@pytest.fixture
async def cluster(nats_server: Any, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(nats_server, tmp_path) as rig:
        await rig.serve(Role.ROUTER, RouterService)
        tokenizer = await rig.serve(Role.TOKENIZER, TokenizerService, tokenizer__max_attempts=2)
        gateway = Scored(rig, tokenizer)
        listening = await gateway.start()
        yield Cluster(rig, gateway, tokenizer)
        listening.cancel()


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, logprobs=1, prompt_logprobs=1)


def lose_rows(node: Node, *which: int) -> None:
    """The worker's so many-th messages with rows are lost."""
    out: Any = node.worker._out
    put, seen = out.put, [0]

    def losing(reply_to: str, item: Any) -> None:
        if item.prompt is not None:
            seen[0] += 1
            if seen[0] in which:
                return
        put(reply_to, item)

    out.put = losing


async def start(cluster: Cluster, *roles: Role, **options: Any) -> list[Node]:
    nodes = [await cluster.rig.add(role, **options) for role in roles]
    await cluster.ready(len(cluster.rig.nodes))
    return nodes


@pytest.mark.parametrize("which", [(1,), (3,), (7,), (2, 5, 7)])
async def test_rows_that_are_lost_are_sent_again(cluster: Cluster, which: tuple[int, ...]) -> None:
    prefill, _ = await start(cluster, Role.PREFILL, Role.DECODE, max_batch_tokens=32)
    lose_rows(prefill, *which)
    name = await cluster.gateway.send(params(1), tokens=TOKENS, echo=True)
    await cluster.gateway.right(name, params(1))


async def test_rows_that_nobody_has_are_made_again(cluster: Cluster) -> None:
    """The sequence is at decode, and its prefill worker has forgotten it."""
    prefill, _ = await start(cluster, Role.PREFILL, Role.DECODE, max_batch_tokens=32)
    lose_rows(prefill, 7)
    name = await cluster.gateway.send(params(40), tokens=TOKENS, echo=True)
    await cluster.gateway.right(name, params(40))
    assert prefill.host.registry.get_sample_value("baton_computed_tokens_total") == 2 * len(TOKENS)


async def test_a_prefill_worker_is_lost_among_its_rows(cluster: Cluster) -> None:
    (first,) = await start(cluster, Role.PREFILL, **SLOW)
    await start(cluster, Role.DECODE)
    name = await cluster.gateway.send(params(40), tokens=TOKENS, echo=True)
    await until(lambda: cluster.live(name).unscored > 40)
    await start(cluster, Role.PREFILL)
    await first.kill()
    await cluster.gateway.right(name, params(40))


async def test_a_decode_worker_is_lost_after_them(cluster: Cluster) -> None:
    """The rows are here: the replay reads the cache like any other."""
    prefill, *_ = await start(cluster, Role.PREFILL, Role.DECODE, Role.DECODE, mock__step_us=4_000)
    name = await cluster.gateway.send(params(100), tokens=TOKENS, echo=True)
    await cluster.gateway.some(name, len(TOKENS) + 20)
    await cluster.holder(name).kill()
    await cluster.gateway.right(name, params(100))
    computed = prefill.host.registry.get_sample_value("baton_computed_tokens_total")
    assert computed is not None and computed < 2 * len(TOKENS)


async def test_many_at_once(cluster: Cluster) -> None:
    await start(cluster, Role.PREFILL, Role.DECODE, Role.DECODE, kv_memory_mb=1)
    sent = {length: prompt(length, length) for length in (1, 2, 63, 64, 65, 129, 200)}
    names = await asyncio.gather(
        *(cluster.gateway.send(params(9), tokens=tokens, echo=True) for tokens in sent.values())
    )
    for name, tokens in zip(names, sent.values(), strict=True):
        await cluster.gateway.right(name, params(9), tokens)
