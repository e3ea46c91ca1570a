"""Scenarios of many clients: those that leave, and those that are too many."""

from __future__ import annotations

import asyncio
import itertools
import time

from baton.cli.chaos.requests import Request
from baton.cli.chaos.stage import StageError
from baton.cli.chaos.under_way import Run

FLOOD_S = 100  # requests in a second; 8 places make about 10
FLOOD_BLOWS = 12  # how long the flood lasts, in times between blows
NORMAL_S = 1.0  # so long after a flood all is as before, and so long a first token takes then at most
ROUNDS = 3
LEAVERS = 7  # clients that leave, for each request of the load
LEAVERS_S = 60  # of them in a second
GROWTH = 1.2  # of all processes together, from the first round to the last
MAX_WAIT_S = 1.0
SLACK_S = 1.5  # of a machine that is busy with the flood itself


async def cancel(run: Run) -> None:
    """As many clients again, three times, leave at random moments; memory does not grow with the rounds."""
    sizes = []
    many = itertools.cycle(run.requests)
    each_round = len(run.requests) * LEAVERS // ROUNDS

    async def one(request: Request) -> None:
        await asyncio.sleep(run.rng.uniform(0.0, each_round / LEAVERS_S))
        await run.load.leave_early(request, run.rng.uniform(0.0, 0.5))
        run.blows += 1

    for _ in range(ROUNDS):
        doomed = [Request(-1, next(many).body | {"max_tokens": 2_000}) for _ in range(each_round)]
        await asyncio.gather(*(one(request) for request in doomed))
        sizes.append(sum(run.stage.memory().values()))
    run.notes.append(f"memory after each round: {', '.join(f'{size >> 20} MB' for size in sizes)}")
    if sizes[-1] > sizes[0] * GROWTH:
        raise StageError(f"memory grows: {run.notes[-1]}")


async def overload(run: Run) -> None:
    """What is admitted comes in time, the rest is refused, and afterwards all is as before."""
    run.excused = lambda request: "server_is_overloaded" in request.error
    began, flood, sizes = time.monotonic(), [], []
    until = began + FLOOD_BLOWS * run.every_s
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            request = Request(-1, dict(run.rng.choice(run.requests).body))
            flood.append(request)
            group.create_task(run.load.send(request))
            run.blows += 1
            if run.blows % (FLOOD_S * 2) == 0:
                sizes.append(sum(run.stage.memory().values()))
            await asyncio.sleep(began + run.blows / FLOOD_S - time.monotonic())
        await asyncio.sleep(NORMAL_S)
        after = Request(-1, dict(run.requests[0].body))
        await run.load.send(after)
    run.notes.append(
        f"{NORMAL_S:g} s after the flood the first token took {after.first_s:.2f} s {after.error}"
    )
    if after.error or after.first_s > NORMAL_S:
        raise StageError(f"no normal service: {run.notes[-1]}")
    _judge_flood(run, flood, until - began)
    half = len(sizes) // 2
    if half and max(sizes[half:]) > max(sizes[:half]) * GROWTH:
        raise StageError(f"memory grows: {', '.join(f'{size >> 20} MB' for size in sizes)}")


def _judge_flood(run: Run, flood: list[Request], seconds: float) -> None:
    """Raises: StageError: what was admitted came late, or what was not was not told so at once."""
    served = [request for request in flood if not request.error]
    refused = [request for request in flood if run.excused(request)]
    unclear = len(flood) - len(served) - len(refused)
    p99 = _percentile([request.first_s for request in served], 0.99)
    slowest_no = _percentile([request.seconds for request in refused], 0.99)
    run.notes.append(
        f"{len(flood)} more in {seconds:.0f} s: {len(served)} served (p99 first token {p99:.2f} s), "
        f"{len(refused)} refused (p99 {slowest_no:.2f} s), {unclear} otherwise"
    )
    if unclear or not served or not refused or max(p99, slowest_no) > MAX_WAIT_S + SLACK_S:
        raise StageError(f"overload was not handled: {run.notes[-1]}")


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else 0.0
