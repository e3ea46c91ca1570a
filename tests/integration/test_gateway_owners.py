"""A gateway's requests when the only tokenizer is gone: they wait for it to come back, and no longer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from worker_rig import Process, Rig, prompt, running, until

from baton.bus.directory import Directory
from baton.protocol import subjects
from baton.protocol.base import pack_tokens
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.liveness import Role
from baton.protocol.request import Generate, TextBatch
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton_services.gateway import exchanges
from baton_services.gateway.exchange import Exchange
from baton_services.gateway.exchanges import Exchanges
from baton_services.router.service import RouterService
from baton_services.tokenizer.service import TokenizerService

TOKENS = prompt(120)
LONG = SamplingParams(max_tokens=300)
RIGHT = bytes(expected_tokens(TOKENS, LONG)).decode()


class Gateway:
    def __init__(self, rig: Rig, exchanges: Exchanges, subject: str, tokenizer: Process) -> None:
        self.rig = rig
        self.exchanges = exchanges
        self.subject = subject
        self.tokenizer = tokenizer

    async def open(self, deadline_ms: int = 60_000) -> Exchange:
        generate = Generate(
            request=uuid.uuid4().hex,
            model="mock",
            reply_to=self.subject,
            prompt_tokens=pack_tokens(TOKENS),
            sampling=LONG,
            deadline_ms=deadline_ms,
        )
        return (await self.exchanges.open([generate], [lambda: None]))[0]

    async def answer(self, exchange: Exchange) -> str | Failure:
        """Its whole text, or why there is none."""
        await until(lambda: exchange.over, 20.0)
        text = ""
        while (delta := exchange.take()) is not None:
            text += delta.text
            if delta.failure is not None:
                return delta.failure
        await self.exchanges.close(exchange, "read")
        return text


@pytest.fixture
async def gateway(nats_server: Any, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(nats_server, tmp_path) as rig:
        await rig.serve(Role.ROUTER, RouterService)
        tokenizer = await rig.serve(Role.TOKENIZER, TokenizerService)
        await rig.add(Role.DECODE, mock__step_us=4_000)
        bus, subject = rig.player.bus, subjects.text("test", time.time_ns())
        directory = Directory(bus, model=rig.model)
        made, inbox = Exchanges(bus, directory), await bus.inbox(subject, TextBatch)

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(directory.run())
                made.start(group, inbox)

        serving = asyncio.create_task(serve())
        await until(lambda: "mock" in made.models(), 5.0)
        await asyncio.sleep(1.1)  # it has been seen to serve
        yield Gateway(rig, made, subject, tokenizer)
        serving.cancel()


async def test_what_runs_and_what_is_new_waits_for_its_successor(gateway: Gateway) -> None:
    begun = await gateway.open()
    await until(lambda: begun.characters > 10)
    await gateway.tokenizer.kill()
    await asyncio.sleep(1.5)
    new = asyncio.create_task(gateway.open())
    await asyncio.sleep(0.5)
    assert not begun.over and not new.done()
    await gateway.rig.serve(Role.TOKENIZER, TokenizerService, name=gateway.tokenizer.host.id)
    assert await gateway.answer(begun) == RIGHT
    assert await gateway.answer(await new) == RIGHT


async def test_none_that_is_not_expected_back_is_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "EXPECTED_BACK_S", 2.0)
    begun = await gateway.open()
    await until(lambda: begun.characters > 10)
    await gateway.tokenizer.kill()
    failure = await gateway.answer(begun)
    assert isinstance(failure, Failure) and failure.code is Code.NO_WORKER
    with pytest.raises(RequestError) as refused:  # at once
        await asyncio.wait_for(gateway.open(), 0.5)
    assert refused.value.failure.code is Code.NO_WORKER


async def test_no_longer_than_to_the_deadline(gateway: Gateway) -> None:
    await gateway.tokenizer.kill()
    began = time.monotonic()
    with pytest.raises(RequestError):
        exchange = await gateway.open(deadline_ms=1_500)
        failure = await gateway.answer(exchange)
        assert isinstance(failure, Failure)
        raise RequestError(failure)
    assert 1.0 < time.monotonic() - began < 4.0


async def test_a_model_is_listed_once_it_can_be_reached(nats_server: Any, tmp_path: Path) -> None:
    """A tokenizer alone is of no use: until a router can place, the model is unknown."""
    async with running(nats_server, tmp_path) as rig:
        bus = rig.player.bus
        directory = Directory(bus, model=rig.model)
        made = Exchanges(bus, directory)
        following = asyncio.create_task(directory.run())
        await rig.serve(Role.TOKENIZER, TokenizerService)
        await rig.add(Role.DECODE)
        await until(lambda: len(directory.live(Role.TOKENIZER)) == 1)
        assert not made.models()
        with pytest.raises(RequestError) as refused:
            await made.open([Generate(request="r", model="mock", reply_to="nobody")], [lambda: None])
        assert refused.value.failure.code is Code.NO_WORKER
        await rig.serve(Role.ROUTER, RouterService)
        await until(lambda: "mock" in made.models(), 5.0)
        following.cancel()
