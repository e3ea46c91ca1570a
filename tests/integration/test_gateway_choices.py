"""The choices of a prompt between a gateway and its tokenizers: handed over as one, then each by itself."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import test_gateway_owners as owners
from worker_rig import Process, until

from baton.protocol.base import pack_tokens
from baton.protocol.errors import Code, RequestError
from baton.protocol.liveness import Role
from baton.protocol.request import Generate
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton_services.gateway.exchange import Exchange
from baton_services.tokenizer.service import TokenizerService

COUNT = 3
PARAMS = SamplingParams(max_tokens=150, temperature=1.0, seed=5)

gateway = owners.gateway  # the fixture


def choices(gateway: owners.Gateway, params: SamplingParams = PARAMS) -> list[Generate]:
    return [
        Generate(
            request=uuid.uuid4().hex,
            model="mock",
            reply_to=gateway.subject,
            prompt_tokens=pack_tokens(owners.TOKENS),
            sampling=params,
            deadline_ms=60_000,
            choice=choice,
        )
        for choice in range(COUNT)
    ]


async def opened(gateway: owners.Gateway) -> list[Exchange]:
    exchanges = await gateway.exchanges.open(choices(gateway), [lambda: None] * COUNT)
    assert not any(each.handing or each.forks or each.generate.forks for each in exchanges)
    return exchanges


async def right(gateway: owners.Gateway, exchanges: list[Exchange]) -> None:
    for choice, exchange in enumerate(exchanges):
        wanted = bytes(expected_tokens(owners.TOKENS, PARAMS, choice=choice)).decode()
        assert await gateway.answer(exchange) == wanted
    assert not len(gateway.exchanges)


def deafen(tokenizers: list[Process], *, taken: bool) -> list[str]:
    """The first `Generate` to any of these gets no answer, taken or not; the list has who that was."""
    deaf: list[str] = []

    def patch(tokenizer: Process) -> None:
        service: Any = tokenizer.service
        take = service._take

        async def takes(delivery: Any) -> None:
            if not deaf:
                deaf.append(tokenizer.host.id)
                if not taken:
                    return
                delivery.reply = ""
            await take(delivery)

        service._take = takes

    for tokenizer in tokenizers:
        patch(tokenizer)
    return deaf


async def test_one_message_to_one_tokenizer(gateway: owners.Gateway) -> None:
    exchanges = await opened(gateway)
    assert {each.generate.resend for each in exchanges} == {0}
    live: Any = gateway.tokenizer.service
    assert {each.id for each in exchanges} <= set(live._live)
    await right(gateway, exchanges)


@pytest.mark.parametrize("taken", [False, True])
async def test_a_tokenizer_that_does_not_answer(gateway: owners.Gateway, taken: bool) -> None:
    second = await gateway.rig.serve(Role.TOKENIZER, TokenizerService)
    await until(lambda: len(gateway.exchanges._tokenizers.ready()) == 2, 5.0)
    deaf = deafen([gateway.tokenizer, second], taken=taken)
    exchanges = await opened(gateway)
    assert {each.generate.resend for each in exchanges} == {1}
    assert len(deaf) == 1 and all(each.owner and each.owner.id != deaf[0] for each in exchanges)
    await right(gateway, exchanges)
    first: Any = next(each for each in (gateway.tokenizer, second) if each.host.id == deaf[0]).service
    await until(lambda: not first._live, 3.0)


async def test_their_tokenizer_dies(gateway: owners.Gateway) -> None:
    exchanges = await opened(gateway)
    await until(lambda: all(each.characters > 10 for each in exchanges), 5.0)
    await gateway.rig.serve(Role.TOKENIZER, TokenizerService)
    await gateway.tokenizer.kill()
    await right(gateway, exchanges)
    assert {each.generate.resend for each in exchanges} == {1}


async def test_one_tokenizer_has_room_for_all_or_for_none(gateway: owners.Gateway) -> None:
    gateway.tokenizer.host.settings.tokenizer.max_requests = COUNT - 1
    with pytest.raises(RequestError) as refused:
        await opened(gateway)
    assert refused.value.failure.code is Code.OVERLOADED and not len(gateway.exchanges)
    gateway.tokenizer.host.settings.tokenizer.max_requests = COUNT
    await right(gateway, await opened(gateway))
