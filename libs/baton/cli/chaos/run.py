"""One scenario from start to end, and what is left when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from baton.cli.chaos.load import Load
from baton.cli.chaos.requests import Request, Undisturbed, expect_mock, make
from baton.cli.chaos.scenarios import SCENARIOS, Scenario
from baton.cli.chaos.stage import WORKERS, Stage, StageError, staged
from baton.cli.chaos.under_way import Run
from baton.config.settings import Settings
from baton.protocol.liveness import Role

SETTLE_S = 6.0  # heartbeats tell within a second what is held; a cancelled pull ends in less
SLOW_S = 5.0  # a longer pause in an answer is told
FOLDER = "baton-chaos-"


@dataclass(frozen=True, slots=True)
class Options:
    """How hard it is tried. Times in seconds."""

    requests: int = 300
    at_once: int = 12
    tokens: int = 64
    longest: int = 1_500
    every_s: float = 5.0
    seed: int = 1
    load: float = 0.0  # share of the measured capacity that is asked for; 0: `at_once` in flight
    log: Path | None = None  # where the services' lines go


@dataclass(slots=True)
class Report:
    """The outcome of one scenario."""

    name: str
    requests: int = 0
    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    slowest_s: float = 0.0
    slow: int = 0  # answers with a pause of more than SLOW_S
    back_s: float = 0.0  # the longest until a killed process was ready again; 0: none was killed
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
            f"slow {self.slow}, longest pause {self.slowest_s:.2f} s"
        )
        if self.back_s:
            text += f", ready again within {self.back_s:.1f} s"
        return "\n".join([f"{text}  ({self.seconds:.0f} s)", *(f"    {note}" for note in self.notes[:10])])


async def run_scenario(
    name: str, settings: Settings, options: Options, undisturbed: Undisturbed | None = None
) -> Report:
    """Starts a cluster, hurts it under load, and takes it down.

    `undisturbed` spares a run without blows to those who know what that gives, and learns it otherwise.

    Raises:
        StageError: it does not start.
    """
    scenario = SCENARIOS[name]
    undisturbed = undisturbed or Undisturbed()
    settings = msgspec.convert(msgspec.to_builtins(settings), Settings)
    scenario.tweak(settings)
    counts = {Role.ROUTER: 1, Role.TOKENIZER: 1, Role.GATEWAY: 1} | scenario.counts
    report = Report(name, requests=options.requests)
    with _folder() as folder:

        def done(killed: int) -> None:
            if killed:
                report.leaked += killed
                report.notes.append(f"{killed} processes did not leave by themselves")

        log = options.log or folder / "log"
        async with staged(settings, counts, folder, log, proxied=scenario.proxied, done=done) as stage:
            await _run(scenario, stage, options, report, undisturbed)
        if left := list((folder / "shm").iterdir()):
            report.leaked += len(left)
            report.notes.append(f"left in shared memory: {', '.join(path.name for path in left)}")
        if not report.clean:
            report.notes.append(_log_tail(log))
    return report


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one run. Those of runs that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        owner = left.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:
        yield Path(folder)


async def _run(
    scenario: Scenario, stage: Stage, options: Options, report: Report, undisturbed: Undisturbed
) -> None:
    model = "mock" if stage.settings.worker.engine == "mock" else stage.settings.model.name
    requests = make(
        options.requests, model=model, seed=options.seed, tokens=options.tokens, longest=options.longest
    )
    undisturbed.fingerprint = stage.fingerprint()
    if not undisturbed.fill(requests) and (model != "mock" or options.load):
        await _measure(Load(stage.gateways, options.at_once), requests, undisturbed)
    if model == "mock":
        await asyncio.to_thread(expect_mock, requests)
    load = Load(stage.gateways, options.at_once, undisturbed.capacity * options.load)
    run = Run(stage, load, requests, options.every_s)
    before, began = stage.memory(), time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(requests))
            group.create_task(_hurt(scenario, run))
    except* StageError as errors:
        report.lost += 1
        report.notes += [str(error) for error in errors.exceptions]
    report.seconds = time.monotonic() - began
    await _settle(stage, report)
    report.blows, report.back_s = run.blows, max(run.back_s, default=0.0)
    report.slowest_s = max(request.slowest_s for request in requests)
    report.slow = sum(request.slowest_s > SLOW_S for request in requests)
    lost = [request for request in requests if request.lost and not run.excused(request)]
    wrong = [request for request in requests if request.wrong]
    report.lost += len(lost)
    report.wrong = len(wrong)
    report.notes += [f"request {request.index}: {request.error}" for request in lost[:4]]
    report.notes += [f"request {one.index}: {one.text!r} instead of {one.expected!r}" for one in wrong[:2]]
    report.notes += [*run.notes[:6], _conditions(run, undisturbed), _growth(before, stage.memory())]


async def _hurt(scenario: Scenario, run: Run) -> None:
    await scenario.hurt(run)


async def _measure(load: Load, requests: list[Request], undisturbed: Undisturbed) -> None:
    """A run without blows: its texts are the right ones, its rate is the capacity."""
    for request in requests:
        request.body["cache_salt"] = "undisturbed"  # or the next run would find its prompts in caches
    began = time.monotonic()
    await load.run(requests)
    for request in requests:
        del request.body["cache_salt"]
        if request.error:
            raise StageError(f"request {request.index} failed before anything was done: {request.error}")
    undisturbed.keep(requests, time.monotonic() - began)


def _conditions(run: Run, undisturbed: Undisturbed) -> str:
    load = run.load
    offered = f"{load.rate:.2f} requests/s of {undisturbed.capacity:.2f}" if load.rate else "as much as goes"
    flying = f", at least {min(run.flying)} in flight at a blow" if run.flying else ""
    return f"asked for: {offered}{flying}"


def _growth(before: dict[str, int], after: dict[str, int]) -> str:
    """Of processes that lived through it all."""
    grown = {name: (after[name] - size) >> 20 for name, size in before.items() if name in after}
    most = max(grown, key=lambda name: grown[name], default="")
    return f"memory: {most} grew most, by {grown[most]} MB" if most else "memory: no process lived through"


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
