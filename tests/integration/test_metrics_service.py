"""The metrics service as a process: its page over HTTP and over the bus, with a process that has figures."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.bus.connection import Bus
from baton.bus.directory import Directory
from baton.config.environ import to_environ
from baton.config.settings import BusSettings, MetricsSettings, Settings
from baton.protocol import subjects
from baton.protocol.codec import Codec
from baton.protocol.liveness import Heartbeat, Role, State
from baton.protocol.request import Accepted
from baton.protocol.stats import Family, MetricsQuery, MetricsText, Sample, Snapshot
from baton.protocol.work import Cancel, Drain

PROBE = str(Path(__file__).parent / "probe_service.py")
SERVE = "import os, sys; from baton.config.load import load; from baton_services.metrics.main import serve; "
SERVE += "sys.exit(serve(load(None, os.environ, {}), sys.argv[1]))"
METRICS = f"metrics-{os.getpid()}"
WITHIN_S = 15.0

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
Labels = frozenset[tuple[str, str]]


@pytest.fixture
async def start(nats_server: BusSettings) -> AsyncIterator[Start]:
    """Starts a process with settings for the session's server."""
    running: list[asyncio.subprocess.Process] = []

    async def start(*command: str, port: int = 0) -> asyncio.subprocess.Process:
        settings = Settings(bus=nats_server, metrics=MetricsSettings(port=port, interval_ms=100))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        running.append(
            await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environ | to_environ(settings),
            )
        )
        return running[-1]

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
async def directory(bus: Bus) -> AsyncIterator[Directory]:
    directory = Directory(bus, model=None)
    following = asyncio.create_task(directory.run())
    yield directory
    following.cancel()
    await asyncio.wait({following})


async def _ready(directory: Directory, id: str) -> Heartbeat:
    def is_ready(directory: Directory) -> bool:
        beat = directory.get(id)
        return beat is not None and beat.state == State.READY

    assert await directory.wait_for(is_ready, WITHIN_S)
    beat = directory.get(id)
    assert beat is not None
    return beat


async def _scrape(url: str) -> dict[str, dict[Labels, float]]:
    """The page as sample name -> labels -> value."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await answer.text()
    series: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return series


async def _scrape_until(url: str, name: str, labels: Labels, value: float | None) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if (await _scrape(url)).get(name, {}).get(labels) == value:
                return
            await asyncio.sleep(0.05)


async def test_one_page_for_the_cluster(start: Start, bus: Bus, directory: Directory) -> None:
    await start("-c", SERVE, METRICS)
    probe = await start(PROBE, "probe-m")
    metrics = await _ready(directory, METRICS)
    told = await _ready(directory, "probe-m")
    assert metrics.role is Role.METRICS and metrics.url.startswith("http://127.0.0.1:")
    for _ in range(3):
        await bus.call(told.subject, Cancel(request="r", attempt=1), Codec(Accepted))

    labels: Labels = frozenset({("role", "kvstore"), ("instance", "probe-m")})
    own: Labels = frozenset({("role", "metrics"), ("instance", METRICS)})
    await _scrape_until(metrics.url, "baton_probe_orders_total", labels, 3)
    await _scrape_until(metrics.url, "baton_up", labels, 1)
    await _scrape_until(metrics.url, "baton_up", own, 1)
    page: MetricsText = await bus.call(metrics.subject, MetricsQuery(), Codec(MetricsText), timeout_s=1)
    assert 'baton_probe_orders_total{instance="probe-m",role="kvstore"} 3.0' in page.text

    probe.terminate()
    await probe.communicate()
    await _scrape_until(metrics.url, "baton_up", labels, 0)
    assert (await _scrape(metrics.url))["baton_probe_orders_total"][labels] == 3, "kept for the last scrape"

    await start(PROBE, "probe-m")
    await _scrape_until(metrics.url, "baton_up", labels, 1)
    await _scrape_until(metrics.url, "baton_probe_orders_total", labels, 0)


async def test_hostile_figures_are_refused_and_the_page_stays(
    start: Start, bus: Bus, directory: Directory
) -> None:
    process = await start("-c", SERVE, METRICS)
    metrics = await _ready(directory, METRICS)
    for name in ('x{a="b"} 1\ny', "fine"):
        family = Family(name, "gauge", "", [Sample("", {"label": 'a"\n'}, 1.0)])
        await bus.publish(
            subjects.stats("other"), Snapshot(role="r", id=name[:1], epoch=1, model="", families=[family])
        )
    family = Family("counted", "counter", "", [Sample("_total", {"label": 'a"\n'}, 1.0)])
    await bus.publish(
        subjects.stats("other"), Snapshot(role="r", id="o", epoch=1, model="", families=[family])
    )
    labels: Labels = frozenset({("role", "r"), ("instance", "o"), ("label", 'a"\n')})
    await _scrape_until(metrics.url, "counted_total", labels, 1)
    await bus.call(metrics.subject, Drain(), Codec(Accepted))
    _, err = await process.communicate()
    assert process.returncode == 0 and err.count(b"metrics refused") == 1


async def test_a_port_in_use_is_one_clear_line(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("-c", SERVE, METRICS, port=port)
        async with asyncio.timeout(WITHIN_S):
            _, err = await process.communicate()
    lines = err.decode().splitlines()
    assert process.returncode == 1 and not any("Traceback" in line for line in lines)
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use): set metrics.port" in lines[-1]


async def test_the_page_is_quick_with_many_processes(start: Start, bus: Bus, directory: Directory) -> None:
    await start("-c", SERVE, METRICS)
    metrics = await _ready(directory, METRICS)
    histogram = Family(
        "h", "histogram", "", [Sample("_bucket", {"le": str(n)}, float(n)) for n in range(300)]
    )
    for number in range(64):
        snapshot = Snapshot(role="decode", id=f"d{number}", epoch=1, model="m", families=[histogram])
        await bus.publish(subjects.stats(f"d{number}"), snapshot)
    last: Labels = frozenset({("role", "decode"), ("instance", "d63"), ("model", "m"), ("le", "299")})
    await _scrape_until(metrics.url, "h_bucket", last, 299)
    page: MetricsText = await bus.call(metrics.subject, MetricsQuery(), Codec(MetricsText), timeout_s=1)
    assert page.text.count("h_bucket{") == 64 * 300
