"""One scenario from start to end, and what is left when it is over."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton.cli.chaos.load import Load, Request, expect_mock, make
from baton.cli.chaos.scenarios import SCENARIOS, Run, Scenario
from baton.cli.chaos.stage import WORKERS, Stage, StageError, staged
from baton.config.settings import Settings
from baton.protocol.liveness import Role

SETTLE_S = 6.0  # heartbeats tell within a second what is held; a cancelled pull ends in less


@dataclass(frozen=True, slots=True)
class Options:
    """How hard it is tried. Times in seconds."""

    requests: int = 300
    at_once: int = 12
    tokens: int = 64
    longest: int = 1_500
    every_s: float = 5.0
    seed: int = 1


@dataclass(slots=True)
class Report:
    """The outcome of one scenario."""

    name: str
    requests: int = 0
    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    blows: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.wrong or self.leaked)

    def line(self) -> str:
        """One line for people; what went wrong follows in lines of their own."""
        text = (
            f"{self.name:<10} {self.requests} requests, {self.blows} blows: lost {self.lost} "
            f"wrong {self.wrong} leaked {self.leaked}  "
            f"slowest pause {self.slowest_s:.2f} s  ({self.seconds:.0f} s)"
        )
        return "\n".join([text, *(f"    {note}" for note in self.notes[:8])])


async def run_scenario(name: str, settings: Settings, options: Options) -> Report:
    """Starts a cluster, hurts it under load, and takes it down.

    Raises:
        StageError: it does not start.
    """
    scenario = SCENARIOS[name]
    settings = msgspec.convert(msgspec.to_builtins(settings), Settings)
    scenario.tweak(settings)
    counts = {Role.ROUTER: 1, Role.TOKENIZER: 1, Role.GATEWAY: 1} | scenario.counts
    report = Report(name, requests=options.requests)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:

        def done(killed: int) -> None:
            if killed:
                report.leaked += killed
                report.notes.append(f"{killed} processes did not leave by themselves")

        async with staged(settings, counts, Path(folder), proxied=scenario.proxied, done=done) as stage:
            await _run(scenario, stage, options, report)
        if left := list((Path(folder) / "shm").iterdir()):
            report.leaked += len(left)
            report.notes.append(f"left in shared memory: {', '.join(path.name for path in left)}")
        if not report.clean:
            report.notes.append(_log_tail(Path(folder) / "log"))
    return report


async def _run(scenario: Scenario, stage: Stage, options: Options, report: Report) -> None:
    model = "mock" if stage.settings.worker.engine == "mock" else stage.settings.model.name
    requests = make(
        options.requests, model=model, seed=options.seed, tokens=options.tokens, longest=options.longest
    )
    load = Load(stage.gateways, options.at_once)
    if model == "mock":
        await asyncio.to_thread(expect_mock, requests)
    else:
        await _undisturbed(load, requests)
    run = Run(stage, load, requests, options.every_s)
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(requests))
            group.create_task(_hurt(scenario, run))
    except* StageError as errors:
        report.lost += 1
        report.notes += [str(error) for error in errors.exceptions]
    report.seconds = time.monotonic() - began
    await _settle(stage, report)
    report.blows = run.blows
    report.slowest_s = max(request.slowest_s for request in requests)
    lost = [request for request in requests if request.lost and not run.excused(request)]
    wrong = [request for request in requests if request.wrong]
    report.lost += len(lost)
    report.wrong = len(wrong)
    report.notes += [f"request {request.index}: {request.error}" for request in lost[:4]]
    report.notes += [f"request {one.index}: {one.text!r} instead of {one.expected!r}" for one in wrong[:2]]
    report.notes += run.notes[:4]


async def _hurt(scenario: Scenario, run: Run) -> None:
    await scenario.hurt(run)


async def _undisturbed(load: Load, requests: list[Request]) -> None:
    """The texts of an undisturbed run, against which the others are held."""
    await load.run(requests)
    for request in requests:
        if request.error:
            raise StageError(f"request {request.index} failed before anything was done: {request.error}")
        request.expected, request.text, request.slowest_s = request.text, "", 0.0
        request.ended = False
    load.done = 0


async def _settle(stage: Stage, report: Report) -> None:
    """Everything must come back to nothing."""
    try:
        await stage.wait_ready(30.0)
    except StageError as error:
        report.lost += 1
        report.notes.append(str(error))
    deadline = time.monotonic() + SETTLE_S
    while (held := stage.held()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    workers = sum(len(stage.ids(role)) for role in WORKERS)
    report.leaked += sum(held.values()) + max(0, stage.pools() - workers)
    report.notes += [f"{id} still holds {count} blocks or sequences" for id, count in held.items()]


def _log_tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    told = [line for line in lines if "WARNING" in line or "ERROR" in line or "CRITICAL" in line]
    return "the services' last words:\n      " + "\n      ".join(told[-12:])
