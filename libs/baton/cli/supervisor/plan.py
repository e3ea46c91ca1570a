"""Which processes a machine runs, with which settings and how many threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.cli.serve import WORKERS
from baton.cli.supervisor.child import Spec
from baton.config.environ import to_environ
from baton.config.keys import new_secret
from baton.config.settings import BusSettings, Settings

# Also the order of the list that people see. One of each but for the workers.
STARTED = ("router", "tokenizer", "prefill", "decode", "kvstore", "metrics", "gateway", "batch")

# Who leaves first: the gateway and batch end what they have begun while all that they need still runs.
STOPPED = (
    ("gateway", "batch"),
    ("tokenizer",),
    ("prefill", "decode"),
    ("router",),
    ("kvstore",),
    ("metrics",),
)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_each(settings: Settings, workers: int, cores: int) -> int:
    """Compute threads of each worker: what was set, else an equal share of the cores, at least one."""
    return settings.worker.threads or max(1, cores // max(1, workers))


def adapt(settings: Settings) -> list[str]:
    """Fits settings to this machine, in place; says in words what was changed and what it costs."""
    notes = []
    if not os.path.isdir(settings.worker.shm_dir):
        missing = settings.worker.shm_dir
        settings.worker.transports = ["tcp"]
        settings.worker.shm_dir = os.environ.get("TMPDIR", "/tmp")
        notes.append(
            f"{missing} is not there: KV blocks go from prefill to decode over TCP instead of shared memory, "
            "which takes longer for long prompts"
        )
    if (settings.gateway.keys_file or settings.gateway.keys) and not settings.gateway.api_key:
        settings.gateway.api_key = new_secret()  # for our own first request, and `baton chat` on this machine
    return notes


def specs(
    settings: Settings,
    bus: BusSettings,
    *,
    prefill: int,
    decode: int,
    threads: int,
    environ: Mapping[str, str],
    batch: int = 1,
) -> list[Spec]:
    """What to start. Settings travel by environment: a command line can be read by every user.

    Variables of ours in `environ` are already part of `settings`, and are dropped.
    """
    settings = msgspec.structs.replace(
        settings, bus=bus, worker=msgspec.structs.replace(settings.worker, threads=threads)
    )
    base = {name: value for name, value in environ.items() if not name.startswith("BATON_")}
    base |= to_environ(settings)
    base |= {"BATON_SUPERVISED": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    counts = {"prefill": prefill, "decode": decode, "batch": batch}
    made = []
    for role in STARTED:
        for number in range(counts.get(role, 1)):
            name = f"{role}-{number}"
            # -P: a file of the folder that we happen to be started in is no module of ours.
            command = (sys.executable, "-P", "-m", "baton.cli.main", "serve", role, "--id", name)
            made.append(Spec(role=role, id=name, command=command, environ=dict(base)))
    return made


def describe(made: list[Spec], threads: int, cores: int) -> str:
    """One line: what is started on how many cores."""
    workers = sum(spec.role in WORKERS for spec in made)
    return (
        f"{len(made)} processes, {workers} of them workers with {threads} "
        f"thread{'s' if threads != 1 else ''} each on {cores} core{'s' if cores != 1 else ''}"
    )
