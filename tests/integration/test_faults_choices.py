"""The choices of one prompt through router, tokenizer and workers, when some of these die or drain."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_faults_replay import LONG, SLOW, TOKENS, Cluster, Gateway, break_steps
from worker_rig import Gate, prompt, running, until

from baton.protocol.errors import Code
from baton.protocol.liveness import Role
from baton.protocol.request import CancelRequest
from baton.protocol.sampling import SamplingParams
from baton.protocol.work import Run
from baton.runner.mock import expected_tokens
from baton_services.router.service import RouterService
from baton_services.tokenizer.service import TokenizerService

COUNT = 4
PARAMS = SamplingParams(max_tokens=200, temperature=1.0, seed=3)


@pytest.fixture
async def cluster(nats_server: Any, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(nats_server, tmp_path) as rig:
        await rig.serve(Role.ROUTER, RouterService)
        tokenizer = await rig.serve(Role.TOKENIZER, TokenizerService, tokenizer__max_attempts=2)
        gateway = Gateway(rig, tokenizer)
        listening = await gateway.start()
        yield Cluster(rig, gateway, tokenizer)
        listening.cancel()


async def send(cluster: Cluster, params: SamplingParams = PARAMS, **fields: Any) -> list[str]:
    forks = [uuid.uuid4().hex for _ in range(COUNT - 1)]
    cluster.gateway.text |= dict.fromkeys(forks, "")
    return [await cluster.gateway.send(params, forks=forks, **fields), *forks]


async def right(cluster: Cluster, names: list[str], params: SamplingParams = PARAMS) -> None:
    for choice, name in enumerate(names):
        last = await cluster.gateway.ended(name, 20.0)
        assert last.failure is None, last.failure
        wanted = bytes(expected_tokens(TOKENS, params, choice=choice)).decode()
        assert cluster.gateway.text[name] == wanted, choice
        assert last.usage is not None and last.usage.completion_tokens == params.max_tokens


async def some(cluster: Cluster, names: list[str], characters: int = 10) -> None:
    for name in names:
        await cluster.gateway.some(name, characters)


async def add(cluster: Cluster, *roles: Role, **options: Any) -> list[Any]:
    nodes = [await cluster.rig.add(role, **options) for role in roles]
    await cluster.ready(len(cluster.rig.nodes))
    return nodes


async def test_undisturbed_they_run_where_the_first_one_does(cluster: Cluster) -> None:
    prefill, *_ = await add(cluster, Role.PREFILL, Role.DECODE, Role.DECODE)
    names = await send(cluster)
    await some(cluster, names)
    assert len({cluster.holder(name).host.id for name in names}) == 1
    await right(cluster, names)
    assert prefill.host.registry.get_sample_value("baton_computed_tokens_total") == len(TOKENS)


async def test_their_decode_worker_is_lost_twice(cluster: Cluster) -> None:
    await add(cluster, Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE, **SLOW)
    names = await send(cluster)
    for at in (10, 60):
        await some(cluster, names, at)
        await cluster.holder(names[0]).kill()
        await until(lambda: all(cluster.live(name).attempt >= 1 for name in names), 3.0)
    await right(cluster, names)


async def test_the_prefill_worker_is_lost_before_they_begin(cluster: Cluster) -> None:
    slow = {"mock__token_us": 5_000, "max_batch_tokens": 16}
    (first,) = await add(cluster, Role.PREFILL, **slow)
    await add(cluster, Role.DECODE)
    names = await send(cluster)
    await until(lambda: first.engine.load().running == 1)
    await add(cluster, Role.PREFILL)
    await first.kill()
    await right(cluster, names)


async def test_the_decode_worker_is_lost_in_the_hand_off(cluster: Cluster) -> None:
    _, first = await add(cluster, Role.PREFILL, Role.DECODE)
    gate = Gate(first)
    names = await send(cluster)
    await gate.reached.wait()
    await add(cluster, Role.DECODE)
    gate._open.set()
    await first.kill()
    await right(cluster, names)


async def test_they_move_away_from_a_draining_worker(cluster: Cluster) -> None:
    _, first = await add(cluster, Role.PREFILL, Role.DECODE, **SLOW)
    names = await send(cluster)
    await some(cluster, names)
    assert cluster.holder(names[0]) is first
    await add(cluster, Role.DECODE)
    await first.drain(10.0)
    await right(cluster, names)


async def test_a_draining_prefill_worker_gives_them_back(cluster: Cluster) -> None:
    slow = {"mock__token_us": 20_000, "max_batch_tokens": 16, "max_sequences": 1}
    (first,) = await add(cluster, Role.PREFILL, **slow)
    await add(cluster, Role.DECODE)
    busy = await cluster.gateway.send(SamplingParams(max_tokens=1), tokens=prompt(60, 5))
    await until(lambda: first.engine.load().running == 1)
    names = await send(cluster)
    await until(lambda: first.engine.load().waiting == 1)
    await add(cluster, Role.PREFILL)
    await first.drain(10.0)
    await right(cluster, names)
    assert (await cluster.gateway.ended(busy)).failure is None


@pytest.mark.slow  # test_engine_forks has its like
async def test_pools_too_small_for_all(cluster: Cluster) -> None:
    await add(cluster, Role.PREFILL, Role.DECODE, kv_memory_mb=1, mock__block_bytes=32_768)
    sets = [await send(cluster) for _ in range(3)]
    for names in sets:
        await right(cluster, names)


@pytest.mark.parametrize("which", [0, 2])
async def test_one_is_cancelled(cluster: Cluster, which: int) -> None:
    await add(cluster, Role.PREFILL, Role.DECODE, **SLOW)
    names = await send(cluster)
    await some(cluster, names)
    gone = names.pop(which)
    await cluster.gateway.bus.publish(cluster.tokenizer.host.subject, CancelRequest(request=gone))
    left = [choice for choice in range(COUNT) if choice != which]
    for choice, name in zip(left, names, strict=True):
        last = await cluster.gateway.ended(name, 20.0)
        assert last.failure is None
        assert cluster.gateway.text[name] == bytes(expected_tokens(TOKENS, PARAMS, choice=choice)).decode()
    assert gone not in cluster.gateway.last and gone not in cluster.tokenizer.service._live


async def test_all_are_cancelled_while_the_prompt_is_read(cluster: Cluster) -> None:
    (first,) = await add(cluster, Role.PREFILL, mock__token_us=5_000, max_batch_tokens=16)
    await add(cluster, Role.DECODE)
    names = await send(cluster)
    await until(lambda: first.engine.load().running == 1)
    for name in names:
        await cluster.gateway.bus.publish(cluster.tokenizer.host.subject, CancelRequest(request=name))
    await until(lambda: not cluster.tokenizer.service._live)
    await cluster.rig.clean()


@pytest.mark.slow  # waits until the others are missed
async def test_the_first_is_cancelled_while_the_prompt_is_read(cluster: Cluster) -> None:
    """No client does that; the others are begun again."""
    (first,) = await add(cluster, Role.PREFILL, mock__token_us=5_000, max_batch_tokens=16)
    await add(cluster, Role.DECODE)
    names = await send(cluster)
    await until(lambda: first.engine.load().running == 1)
    await cluster.gateway.bus.publish(cluster.tokenizer.host.subject, CancelRequest(request=names[0]))
    for choice, name in enumerate(names[1:], start=1):
        last = await cluster.gateway.ended(name, 20.0)
        assert last.failure is None
        assert cluster.gateway.text[name] == bytes(expected_tokens(TOKENS, PARAMS, choice=choice)).decode()


async def test_what_fails_of_itself_fails_for_all(cluster: Cluster) -> None:
    for node in await add(cluster, Role.PREFILL, Role.DECODE):
        break_steps(node, TOKENS)
    for name in await send(cluster):
        last = await cluster.gateway.ended(name, 20.0)
        assert last.failure is not None and last.failure.code is Code.INTERNAL


async def test_what_is_refused_is_refused_for_all(cluster: Cluster) -> None:
    await add(cluster, Role.PREFILL, Role.DECODE)
    for name in await send(cluster, tokens=[999_999]):
        last = await cluster.gateway.ended(name)
        assert last.failure is not None and last.failure.code is Code.INVALID_REQUEST


async def test_without_workers_they_wait_together(cluster: Cluster) -> None:
    names = await send(cluster, LONG)
    await asyncio.sleep(0.3)
    assert not cluster.gateway.last
    await add(cluster, Role.DECODE)
    await right(cluster, names, LONG)


@pytest.mark.parametrize("taken", [False, True])
async def test_a_run_without_an_answer(cluster: Cluster, taken: bool) -> None:
    """It is not known then whether it was taken: another attempt, perhaps beside the first."""
    prefill, _ = await add(cluster, Role.PREFILL, Role.DECODE)
    lose_an_answer(prefill, taken=taken)
    await right(cluster, await send(cluster))


def lose_an_answer(node: Any, *, taken: bool) -> None:
    """The worker's answer to its first `Run` is lost, or the `Run` itself."""
    control: Any = node.worker._control
    handle, left = control._handle, [True]

    async def handled(delivery: Any) -> None:
        if isinstance(delivery.message, Run) and left:
            left.pop()
            delivery.reply = ""
            if not taken:
                return
        await handle(delivery)

    control._handle = handled
