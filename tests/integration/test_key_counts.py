"""A key's counts over several gateways on a real bus: who keeps them, and what is left when one goes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from baton.bus.connection import Bus
from baton.config.settings import Settings
from baton.protocol.liveness import Role, State
from baton.service import heart
from baton.service.base import ServiceHost
from baton_services.gateway.counts import Counts
from baton_services.gateway.keys import Key

Connect = Callable[[str], Awaitable[Bus]]


class Peer:
    """What a gateway is to the others: heartbeats and counts."""

    def __init__(self, bus: Bus, id: str) -> None:
        self.host = ServiceHost(Role.GATEWAY, Settings(), bus, id=id, model="")
        self.counts = Counts(self.host)
        self.started = asyncio.Event()
        self.task = asyncio.create_task(self.live())

    async def live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(heart.beat(self.host, lambda: None))
            group.create_task(heart.answer_asks(self.host))
            group.create_task(self.host.directory.run())
            await self.counts.start(group)
            self.host.beat.state = State.READY
            await self.host.announce()
            self.started.set()

    async def sees(self, *peers: Peer) -> None:
        wanted = {peer.host.id for peer in peers}
        await self.host.directory.wait_for(
            lambda seen: wanted <= {beat.id for beat in seen.live(Role.GATEWAY)}, 10
        )

    def keeps(self, key: Key) -> bool:
        return self.counts._keeper(key.owner) is None

    async def kill(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.host.bus.close()


@pytest.fixture
async def join(connect: Connect) -> AsyncIterator[Callable[[], Awaitable[Peer]]]:
    """One more gateway, known to all of this test and knowing them."""
    peers: list[Peer] = []
    name = uuid.uuid4().hex[:8]

    async def start() -> Peer:
        peer = Peer(await connect(f"gateway-{name}-{len(peers)}"), f"gateway-{name}-{len(peers)}")
        peers.append(peer)
        await peer.started.wait()
        alive = [each for each in peers if not each.task.done()]
        for each in alive:
            await each.sees(*alive)
        return peer

    yield start
    for peer in peers:
        if not peer.task.done():
            await peer.kill()


def key_of(keeper: Peer, **limits: Any) -> Key:
    """A key whose count this gateway keeps."""
    while True:
        key = Key("k", uuid.uuid4().hex, **limits)
        if keeper.keeps(key):
            return key


async def admitted(peers: list[Peer], key: Key, tries: int, *, end: bool = True) -> int:
    """How many of so many requests at once, sent to all of them in turn, are let in."""
    asked = [peers[number % len(peers)] for number in range(tries)]
    answers = await asyncio.gather(*(peer.counts.take(key, 1) for peer in asked))
    accepted = [peer for peer, taken in zip(asked, answers, strict=True) if not taken.refused]
    if end:
        for peer in accepted:
            peer.counts.settle(key, tokens=0, age_s=0.0)
    return len(accepted)


async def test_two_gateways_hold_one_limit(join: Callable[[], Awaitable[Peer]]) -> None:
    one, two = await join(), await join()
    for keeper in (one, two):
        key = key_of(keeper, requests_per_minute=40)
        assert [one.keeps(key), two.keeps(key)].count(True) == 1
        assert await admitted([one, two], key, 200) == 40
        key = key_of(keeper, concurrent=5)
        assert await admitted([one, two], key, 20, end=False) == 5


async def test_a_gateway_that_dies_takes_no_count_with_it(join: Callable[[], Awaitable[Peer]]) -> None:
    one, two = await join(), await join()
    used, busy = key_of(one, requests_per_minute=10), key_of(two, concurrent=4)
    assert await admitted([one, two], used, 8) == 8
    assert await admitted([one, one, one, two], busy, 4, end=False) == 4
    await asyncio.sleep(0.7)  # counts are told several times a second
    await one.kill()
    assert await admitted([two], used, 8) == 2
    async with asyncio.timeout(10):  # what the dead one had running has ended
        while await admitted([two], busy, 1, end=False) == 0:
            await asyncio.sleep(0.1)


async def test_a_gateway_that_comes_goes_on_with_the_counts(join: Callable[[], Awaitable[Peer]]) -> None:
    one = await join()
    keys = [Key("k", uuid.uuid4().hex, requests_per_minute=10) for _ in range(20)]
    for key in keys:
        assert await admitted([one], key, 7) == 7
    two = await join()
    moved = [key for key in keys if two.keeps(key)]
    assert moved
    await asyncio.sleep(0.7)
    for key in keys:
        assert await admitted([one, two], key, 10) == 3
