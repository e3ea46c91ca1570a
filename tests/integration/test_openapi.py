"""`/openapi.json`: it names what is served, no more and no less, and what it says holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import hdrs
from running import Running

from baton.bus.connection import Bus
from baton.config.settings import Settings
from baton.protocol.liveness import Role
from baton.service.base import ServiceHost
from baton_services.gateway.generate import Generator
from baton_services.gateway.openapi.document import document
from baton_services.gateway.service import GatewayService

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "8", "--mock-step-us", "100", "--mock-token-us", "1",
    "--mock-max-context", "512",
)  # fmt: skip

# What is valid by its schema may still be refused: rules between fields, ids that there are not.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "403", "404", "409", "413", "415", "429", "503", "529"]
"""


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("openapi"), *FLAGS) as running:
        yield running
        assert "Traceback" not in running.log


def schemathesis(baton: Running, folder: Path, *options: str) -> None:
    """Runs it against this Baton; it must find nothing."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
        *(
            "run",
            f"{baton.url}/openapi.json",
            "--no-color",
            "--warnings",
            "off",
            "--generation-deterministic",
        ),
        *("--request-timeout", "20", *options),
    ]
    plugins = Path(__file__).parents[1] / "plugins"
    environ = {**os.environ, "PYTHONPATH": str(plugins), "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    assert "No issues found" in done.stdout


async def test_it_names_what_is_served(bus: Bus) -> None:
    host = ServiceHost(Role.GATEWAY, Settings(), bus, id="gateway-openapi", model="")
    service = GatewayService(host)
    generator = Generator(
        service._exchanges,
        service._metrics,
        reply_to="",
        max_requests=1,
        timeout_s=1,
        draining=lambda: False,
        limits=service._limits,
    )
    served: dict[str, set[str]] = {}
    for route in service._app(generator).router.routes():
        if route.resource is not None and route.method != hdrs.METH_HEAD:
            served.setdefault(route.resource.canonical, set()).add(route.method.lower())
    aliases = {path for path in served if "/v1" + path in served}
    assert all(served[path] == served["/v1" + path] for path in aliases)
    told = {path: set(methods) for path, methods in document()["paths"].items()}

    def bare(paths: dict[str, set[str]]) -> dict[str, set[str]]:
        """Whatever the parts of a path are called."""
        return {
            "/".join("{}" if "{" in part else part for part in path.split("/")): paths[path] for path in paths
        }

    assert bare(told) == bare({path: methods for path, methods in served.items() if path not in aliases})


def test_schemathesis_finds_nothing(baton: Running, tmp_path: Path) -> None:
    schemathesis(baton, tmp_path, "--phases", "fuzzing", "--max-examples", "1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_nothing_however_long_it_looks(baton: Running, tmp_path: Path) -> None:
    schemathesis(baton, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "40")
