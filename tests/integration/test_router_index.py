"""The router's prefix index follows its workers: events, gaps, snapshots, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fake_cluster import Cluster, Router

from baton.bus.connection import Bus
from baton.protocol import subjects
from baton.protocol.errors import Code
from baton.protocol.kvevents import KvEvents
from baton.protocol.liveness import State

CHAIN = list(range(1, 9))
ALL = 16 * len(CHAIN)


@pytest.fixture
async def cluster(connect: Callable[[str], Awaitable[Bus]], bus: Bus) -> AsyncIterator[Cluster]:
    cluster = Cluster(connect, bus)
    yield cluster
    await cluster.close()


async def reaches(router: Router, hit_tokens: int, chain: list[int] | None = None) -> None:
    """Waits until the router finds `hit_tokens` of the chain."""
    async with asyncio.timeout(10):
        while await router.hits(chain or CHAIN) != hit_tokens:
            await asyncio.sleep(0.01)


async def test_events_are_applied_as_they_come(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await router.until(lambda: router.host.beat.routable)
        assert await router.hits(CHAIN) == 0
        await worker.stores(*CHAIN)
        await reaches(router, ALL)
        await worker.stores(removed=tuple(CHAIN[3:]))
        await reaches(router, 3 * 16)
        await worker.event(1, tuple(CHAIN))  # a duplicate
        await worker.stores(99)
        await reaches(router, 16, [99])
        assert await router.hits(CHAIN) == 3 * 16 and worker.snapshots == 1


async def test_a_gap_brings_a_snapshot_in_pieces_and_what_came_meanwhile_counts(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await reaches(router, 0)
        worker.piece = 3
        await worker.stores(*CHAIN, lost=True)
        assert await router.hits(CHAIN) == 0
        await worker.stores(50)  # its number gives the gap away
        await worker.stores(51)
        await reaches(router, ALL)
        await reaches(router, 32, [50, 51])
        assert worker.snapshots == 2


async def test_pieces_of_different_snapshots_are_not_mixed(cluster: Cluster) -> None:
    """Between the pieces another router asked, and the worker's cache had changed."""
    worker = await cluster.worker("d", held=CHAIN.copy(), number=1, piece=4)

    def change() -> None:
        worker.held, worker.number = [*CHAIN[:4], 77, 78, 79], 2

    worker.after_piece = change
    async with cluster.router() as router:
        await reaches(router, 4 * 16)
        await reaches(router, 16, [79])
        assert worker.snapshots == 2


async def test_a_lost_last_event_is_noticed_by_heartbeats(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await reaches(router, 0)
        await worker.stores(*CHAIN, lost=True)
        await worker.announce()  # may have overtaken the event
        await asyncio.sleep(0.1)
        assert await router.hits(CHAIN) == 0 and worker.snapshots == 1
        await worker.announce()
        await reaches(router, ALL)


async def test_a_worker_that_left_is_forgotten(cluster: Cluster) -> None:
    await cluster.worker("other")
    worker = await cluster.worker("d", held=CHAIN.copy(), number=1)
    async with cluster.router() as router:
        await reaches(router, ALL)
        await worker.announce(state=State.STOPPED)
        await reaches(router, 0)
        await worker.event(2, (9,))  # of nobody: ignored
        assert await router.hits([9]) == 0


async def test_a_new_epoch_starts_with_its_own_snapshot(cluster: Cluster) -> None:
    worker = await cluster.worker("d", held=CHAIN.copy(), number=7)
    async with cluster.router() as router:
        await reaches(router, ALL)
        await cluster.worker("d", epoch=2, held=CHAIN[:2])
        await reaches(router, 2 * 16)
        await worker.event(8, tuple(CHAIN))
        assert await router.hits(CHAIN) == 2 * 16


async def test_not_routable_before_the_index_is_filled_and_not_held_up_for_ever(cluster: Cluster) -> None:
    now = 1_000.0
    worker = await cluster.worker("d", held=CHAIN.copy(), number=1, silent=True)
    async with cluster.router(clock=lambda: now) as router:
        await router.until(lambda: worker.snapshots > 0)
        await asyncio.sleep(0.2)
        assert not router.host.beat.routable
        now += 3.0
        await router.until(lambda: router.host.beat.routable)
        worker.silent = False
        await reaches(router, ALL)


async def test_malformed_events_harm_nobody(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await reaches(router, 0)
        broken = KvEvents(worker="d", epoch=1, number=1, stored=b"1234567")
        await cluster.bus.publish(subjects.kv_events(cluster.model, "d", 1), broken)
        worker.number = 1
        worker.held = CHAIN.copy()
        await reaches(router, ALL)
        refusal = await router.refused(hashes=b"123")
        assert refusal.code is Code.MALFORMED
