"""The router answers `Place` in time, whatever its workers and fellow routers do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fake_cluster import Cluster, Router

from baton.bus.connection import Bus, NoResponder
from baton.bus.directory import Directory
from baton.protocol.errors import Code
from baton.protocol.liveness import Load, Role, State
from baton.protocol.placing import Placed, Unreachable
from baton_services.router.service import EXPECTED_BACK_S

P, D = Role.PREFILL, Role.DECODE
FULL = Load(running=8)


@pytest.fixture
async def cluster(connect: Callable[[str], Awaitable[Bus]], bus: Bus) -> AsyncIterator[Cluster]:
    cluster = Cluster(connect, bus)
    yield cluster
    await cluster.close()


async def knows(router: Router, *ids: str) -> None:
    """Waits until the router has heard these workers."""
    await router.until(lambda: {*ids} <= router.service._view.workers.keys())


async def test_bursts_spread_over_both_roles_between_heartbeats(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.worker(f"p{number}", P)
        await cluster.worker(f"d{number}", D)
    async with cluster.router() as router:
        await knows(router, "p0", "p1", "p2", "d0", "d1", "d2")
        placements = await asyncio.gather(*(router.place() for _ in range(18)))
        assert set(Counter(p.decode.id for p in placements).values()) == {6}
        assert set(Counter(p.prefill.id for p in placements if p.prefill).values()) == {6}


async def test_draining_and_unreachable_workers_get_nothing(cluster: Cluster) -> None:
    first, second = await cluster.worker("d0"), await cluster.worker("d1")
    async with cluster.router() as router:
        await knows(router, "d0", "d1")
        await first.announce(state=State.DRAINING)
        await router.until(lambda: router.service._view.workers["d0"].beat.state is State.DRAINING)
        assert {(await router.place()).decode.id for _ in range(4)} == {"d1"}
        await first.announce(state=State.READY)
        await router.until(lambda: router.service._view.workers["d0"].beat.state is State.READY)
        await cluster.bus.publish(router.host.subject, Unreachable(worker="d1", epoch=1))
        assert {(await router.place()).decode.id for _ in range(4)} == {"d0"}
        await second.announce()  # may have been on its way
        await second.announce()
        await router.until(lambda: router.service._view.workers["d1"].usable)
        assert {(await router.place()).decode.id for _ in range(4)} == {"d0", "d1"}


async def test_each_role_is_served_by_the_other_when_its_last_worker_is_gone(cluster: Cluster) -> None:
    prefill, decode = await cluster.worker("p", P), await cluster.worker("d")
    async with cluster.router() as router:
        await knows(router, "p", "d")
        both = await router.place()
        assert both.prefill is not None and (both.prefill.id, both.decode.id) == ("p", "d")
        await decode.announce(state=State.STOPPED)
        await router.until(lambda: "d" not in router.service._view.workers)
        alone = await router.place()
        assert alone.prefill is None and alone.decode.id == "p"
        await decode.announce(state=State.READY, epoch=2)
        await prefill.announce(state=State.STOPPED)
        await router.until(lambda: router.service._view.workers.keys() == {"d"})
        alone = await router.place()
        assert alone.prefill is None and alone.decode.id == "d"
        await prefill.announce(state=State.READY, epoch=2)
        await knows(router, "p", "d")
        both = await router.place()  # and each does its own work again
        assert both.prefill is not None and (both.prefill.id, both.decode.id) == ("p", "d")


async def test_one_that_waits_is_placed_when_a_heartbeat_or_an_end_makes_room(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await knows(router, "d")
        await worker.announce(load=FULL)
        await router.until(lambda: router.service._view.workers["d"].sequences == 8)
        waiting = asyncio.create_task(router.place())
        await router.until(lambda: len(router.service._queue) == 1)
        await worker.announce(load=Load(running=7))
        first = await waiting
        assert first.decode.id == "d" and first.queued_ms > 0
        waiting = asyncio.create_task(router.place(request="second"))
        await router.until(lambda: len(router.service._queue) == 1)
        await cluster.bus.publish(router.host.subject, Placed(request="r1", attempt=0))
        assert (await waiting).decode.id == "d"


async def test_refusals_come_in_time_and_say_why(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router(queue_limit=1) as router:
        await knows(router, "d")
        assert (await router.refused(16_000)).code is Code.CONTEXT_LENGTH
        await worker.announce(load=FULL)
        await router.until(lambda: router.service._view.workers["d"].sequences == 8)
        late = asyncio.create_task(router.refused(deadline_ms=300))
        await router.until(lambda: len(router.service._queue) == 1)
        overloaded = await router.refused()
        assert overloaded.code is Code.OVERLOADED and overloaded.retry_after_ms
        assert (await late).code is Code.DEADLINE


async def test_asked_again_the_newest_asker_is_answered(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await knows(router, "d")
        await worker.announce(load=FULL)
        await router.until(lambda: router.service._view.workers["d"].sequences == 8)
        first = asyncio.create_task(router.place(request="r", timeout_s=60))
        await router.until(lambda: len(router.service._queue) == 1)
        second = asyncio.create_task(router.place(request="r"))
        await asyncio.sleep(0.1)
        assert len(router.service._queue) == 1
        await worker.announce()
        assert (await second).decode.id == "d"
        assert not first.done()
        first.cancel()


async def test_without_any_worker_it_waits_while_one_may_come_back_then_says_so(cluster: Cluster) -> None:
    now = 1_000.0
    worker = await cluster.worker("d")
    async with cluster.router(clock=lambda: now) as router:
        await knows(router, "d")
        now += 10_000.0  # idle for hours: the worker was there until now
        await worker.announce(state=State.STOPPED)
        await router.until(lambda: not router.service._view.workers)
        waiting = asyncio.create_task(router.refused(deadline_ms=10_000_000))
        await router.until(lambda: len(router.service._queue) == 1)
        now += EXPECTED_BACK_S - 1
        await asyncio.sleep(0.25)
        assert not waiting.done()
        now += 2
        assert (await waiting).code is Code.NO_WORKER

        assert (await router.refused(deadline_ms=10_000_000)).code is Code.NO_WORKER  # still, and at once
        await worker.announce(state=State.READY, epoch=2)
        await knows(router, "d")
        assert (await router.place()).decode.id == "d"


async def test_the_standby_takes_over_with_a_warm_index(cluster: Cluster) -> None:
    chain = list(range(1, 9))
    await cluster.worker("d0")
    worker = await cluster.worker("d1")
    directory = Directory(cluster.bus, model=cluster.model)
    following = asyncio.create_task(directory.run())
    async with cluster.router("router-1") as oldest, cluster.router("router-2") as standby:
        await knows(standby, "d0", "d1")
        await worker.stores(*chain)
        await directory.wait_for(lambda d: sum(b.routable for b in d.live(Role.ROUTER)) == 2, 5)
        assert [beat.id for beat in directory.live(Role.ROUTER)] == ["router-1", "router-2"]
        await oldest.until(lambda: len(oldest.service._index) == len(chain))
        await oldest.kill()
        with pytest.raises(NoResponder):
            await oldest.place()
        directory.exclude("router-1", oldest.host.epoch)
        assert [beat.id for beat in directory.live(Role.ROUTER)] == ["router-2"]
        placement = await standby.place(129, hashes=chain)
        assert placement.decode.id == "d1" and placement.decode_hit_tokens == 128
    following.cancel()


async def test_a_draining_router_places_what_waits_and_hands_over_to_the_standby(cluster: Cluster) -> None:
    worker = await cluster.worker("d")
    async with cluster.router() as router:
        await knows(router, "d")
        await worker.announce(load=FULL)
        await router.until(lambda: router.service._view.workers["d"].sequences == 8)
        waiting, given_up = asyncio.create_task(router.place()), asyncio.create_task(router.refused(400))
        await router.until(lambda: len(router.service._queue) == 2)
        draining = asyncio.create_task(router.service.drain(5))
        await router.until(lambda: router.host.beat.state is State.DRAINING)
        assert not router.host.beat.routable
        await worker.announce(load=Load(running=7))
        assert (await waiting).decode.id == "d"
        draining.cancel()
        await router.service.stop()
        assert (await given_up).code is Code.DRAINING
