"""What is done to the cluster while load runs. Each scenario is one coroutine over a `Stage` and a `Load`."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.bus.directory import Directory
from baton.cli.chaos.crowds import MAX_WAIT_S, cancel, overload
from baton.cli.chaos.requests import Request
from baton.cli.chaos.stage import WORKERS, StageError
from baton.cli.chaos.under_way import Run
from baton.config.settings import Settings
from baton.protocol.liveness import Role, State

READY_S = 60.0
CLEAR_S = 3.5  # after so long without a bus every live request has ended with one clear error
BACK_S = 5.0  # so long after its return the next request succeeds
READY_AGAIN_S = 2.0  # every process has found the bus again by then
TEN_S = 10.0


Hurt = Callable[[Run], Awaitable[None]]
Tweak = Callable[[Settings], None]


def _as_it_is(settings: Settings) -> None:
    """No setting is changed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    words: str
    hurt: Hurt
    counts: dict[Role, int] = field(default_factory=dict)  # beside one router, tokenizer and gateway
    tweak: Tweak = _as_it_is
    proxied: bool = False


async def _repeatedly(run: Run, blow: Callable[[str], Awaitable[None]], victims: Iterator[str]) -> None:
    """One blow after the other, for as long as the load runs."""
    while await run.in_flight():
        victim = next(victims)
        await run.stage.wait_ready(READY_S)  # never the last of its role
        if not await run.some_moment():
            return
        began = time.monotonic()
        await blow(victim)
        run.blows += 1
        await asyncio.sleep(began + run.every_s - time.monotonic())


def _alternating(run: Run, roles: tuple[Role, ...]) -> Iterator[str]:
    """Every process of these roles, the roles in turn, for ever."""
    rounds = [itertools.cycle(run.stage.ids(role)) for role in roles]
    return (next(names) for names in itertools.cycle(rounds))


async def nothing(run: Run) -> None:
    """Undisturbed."""


async def kill_workers(run: Run) -> None:
    await _repeatedly(run, partial(_kill, run), _alternating(run, WORKERS))


async def kill_tokenizer(run: Run) -> None:
    await _repeatedly(run, partial(_kill, run), _alternating(run, (Role.TOKENIZER,)))


async def kill_router(run: Run) -> None:
    await _repeatedly(run, partial(_kill, run), _alternating(run, (Role.ROUTER,)))


async def _kill(run: Run, id: str) -> None:
    """SIGKILL; returns once its successor is ready."""
    stage = run.stage
    before, began = stage.pid(id), time.monotonic()
    stage.signal(id, signal.SIGKILL)

    def successor(directory: Directory) -> bool:
        beat = directory.get(id)
        return beat is not None and beat.state is State.READY and beat.pid not in (0, before)

    await stage.directory.wait_for(successor, READY_S)
    run.back_s.append(time.monotonic() - began)


async def stop_workers(run: Run) -> None:
    async def freeze(id: str) -> None:
        await run.stage.freeze(id, 5.0)

    await _repeatedly(run, freeze, _alternating(run, WORKERS))


async def short_outage(run: Run) -> None:
    while await run.in_flight():
        await run.stage.outage(1.0)
        run.blows += 1
        await run.stage.wait_ready(READY_S)
        await asyncio.sleep(run.every_s)


async def long_outage(run: Run) -> None:
    """Live requests end with one clear error; those sent after the bus's return succeed."""
    if not await run.in_flight():
        return
    alive = run.stage.memory().keys()
    run.blows, gone = 1, time.monotonic()
    await run.stage.outage(TEN_S)
    back = time.monotonic()
    await run.stage.wait_ready(READY_S)
    ready_s = time.monotonic() - back
    run.notes.append(f"ready {ready_s:.1f} s after the bus")
    if ready_s > BACK_S or run.stage.memory().keys() != alive:
        raise StageError("the cluster did not come back by itself in time")

    def ended_well(request: Request) -> bool:
        """It was under way or sent while there was no bus, and was refused clearly and soon."""
        since = max(request.began, gone)
        soon = request.began + request.seconds - since < CLEAR_S
        return request.began < back + READY_AGAIN_S and soon and "message_bus_lost" in request.error

    run.excused = ended_well


async def cut_links(run: Run) -> None:
    while await run.in_flight():
        for proxy in run.stage.proxies:
            proxy.cut()
        await asyncio.sleep(2.0)
        for proxy in run.stage.proxies:
            proxy.mend()
        run.blows += 1
        await asyncio.sleep(run.every_s)


async def rolling_restart(run: Run) -> None:
    for role in _TWO:
        for id in run.stage.ids(role):
            grace_s = run.stage.settings.worker.grace_ms / 1000
            await run.stage.restart(id, grace_s + 5.0)
            await run.stage.wait_ready(READY_S)
            run.blows += 1


async def one_of_each(run: Run) -> None:
    """A short run for the tests: each kind of blow once, those to different roles at once."""
    stage = run.stage

    async def restart(role: Role) -> None:
        await stage.restart(stage.ids(role)[0], stage.settings.worker.grace_ms / 1000 + 5.0)

    async def kill(role: Role, which: int = -1) -> None:
        await _kill(run, stage.ids(role)[which])

    async def freeze(role: Role) -> None:
        await stage.freeze(stage.ids(role)[0], 3.0)

    rounds: list[list[Callable[[], Awaitable[None]]]] = [
        [partial(kill, Role.DECODE), partial(kill, Role.PREFILL)],
        [partial(kill, Role.TOKENIZER), partial(restart, Role.DECODE), partial(kill, Role.ROUTER, 0)],
        [partial(stage.outage, 1.0)],
        [partial(freeze, Role.DECODE), partial(restart, Role.TOKENIZER)],
        [partial(restart, Role.GATEWAY), partial(restart, Role.PREFILL)],
    ]
    for blows in rounds:
        await stage.wait_ready(READY_S)
        if not await run.some_moment():
            return
        await asyncio.gather(*(blow() for blow in blows))
        run.blows += len(blows)
        await asyncio.sleep(run.every_s)


def _short_leases(settings: Settings) -> None:
    """A worker that stands still wakes up long after its leases are over."""
    settings.worker.lease_ms = 2_000


def _few_places(settings: Settings) -> None:
    """Workers that run 8 sequences, and a router that is not patient."""
    settings.worker.max_sequences = 8
    settings.router.max_wait_ms = int(MAX_WAIT_S * 1000)


def _small_pool(settings: Settings) -> None:
    """A decode pool of a few sequences; the model's blocks decide how many."""
    settings.worker.kv_memory_mb = 1 if settings.worker.engine == "mock" else 96
    settings.mock.block_bytes = 8_192  # 128 blocks: one long and a few short sequences


_ONE = {Role.PREFILL: 1, Role.DECODE: 1}
_SEVERAL = {Role.PREFILL: 2, Role.DECODE: 3}
_SERVING = (*WORKERS, Role.TOKENIZER, Role.ROUTER, Role.GATEWAY)
_TWO = dict.fromkeys((*_SERVING, Role.KVSTORE, Role.METRICS), 2)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("none", "nothing happens", nothing, _SEVERAL),
        Scenario("kill", "a prefill or decode worker is killed (-9) again and again", kill_workers, _SEVERAL),
        Scenario("stop", "a worker stands still for 5 s (SIGSTOP)", stop_workers, _SEVERAL, _short_leases),
        Scenario("tokenizer", "the tokenizer is killed", kill_tokenizer, _SEVERAL | {Role.TOKENIZER: 2}),
        Scenario("router", "the router is killed, with a standby", kill_router, _SEVERAL | {Role.ROUTER: 2}),
        Scenario("cut", "no bytes from prefill to decode for 2 s", cut_links, _SEVERAL, proxied=True),
        Scenario("full", "decode pools are full", nothing, {Role.PREFILL: 2, Role.DECODE: 1}, _small_pool),
        Scenario("cancel", "clients leave at any moment", cancel, {Role.PREFILL: 2, Role.DECODE: 2}),
        Scenario("overload", "ten times what it can do is asked for", overload, _ONE, _few_places),
        Scenario("bus1", "nats-server is gone for 1 s", short_outage, _SEVERAL),
        Scenario("bus10", "nats-server is gone for 10 s", long_outage, _SEVERAL),
        Scenario("each", "each kind of blow in turn", one_of_each, dict.fromkeys(_SERVING, 2)),
        Scenario("rolling", "SIGTERM to every service, one by one", rolling_restart, _TWO),
    )
}
