from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from baton.cli.supervisor import plan, preflight
from baton.config.load import load
from baton.config.settings import BusSettings, Settings


def test_cores_are_shared_among_the_workers() -> None:
    settings = Settings()
    assert plan.threads_each(settings, 2, 8) == 4
    assert plan.threads_each(settings, 4, 2) == 1
    assert plan.threads_each(settings, 3, 8) == 2
    settings.worker.threads = 5
    assert plan.threads_each(settings, 4, 2) == 5


def test_one_process_a_service_and_worker_with_settings_by_environment() -> None:
    settings = Settings()
    settings.gateway.api_key = "key-of-the-api"
    bus = BusSettings(url="nats://127.0.0.1:9", user="baton", password="hush-hush")
    environ = {"PATH": "/bin", "BATON_CONFIG": "/gone.toml", "BATON_GATEWAY_PORT": "1"}
    made = plan.specs(settings, bus, prefill=2, decode=1, threads=3, environ=environ)
    ids = [spec.id for spec in made]
    assert sorted(ids) == sorted(
        [
            "gateway-0",
            "tokenizer-0",
            "router-0",
            "prefill-0",
            "prefill-1",
            "decode-0",
            "kvstore-0",
            "metrics-0",
            "batch-0",
        ]
    )
    for spec in made:
        assert "hush" not in " ".join(spec.command)
        assert "hush" not in repr(spec)
        assert "key-of-the-api" not in " ".join(spec.command)
        got = load(None, spec.environ, {})
        assert got.bus == bus
        assert got.worker.threads == 3
        assert got.gateway.port == settings.gateway.port  # ours, not what the environment said before
        assert spec.environ["BATON_SUPERVISED"] == str(os.getpid())
        assert spec.environ["PATH"] == "/bin"


def test_every_role_is_stopped_after_those_that_need_it() -> None:
    order = [role for stage in plan.STOPPED for role in stage]
    assert sorted(order) == sorted(plan.STARTED)
    assert order[0] == "gateway"


def test_without_shared_memory_the_handoff_goes_over_tcp(tmp_path: Path) -> None:
    settings = Settings()
    settings.worker.shm_dir = str(tmp_path / "none")
    [note] = plan.adapt(settings)
    assert settings.worker.transports == ["tcp"]
    assert os.path.isdir(settings.worker.shm_dir)
    assert "TCP" in note
    settings = Settings()
    settings.worker.shm_dir = str(tmp_path)
    assert plan.adapt(settings) == []
    assert settings.worker.transports == ["shm", "tcp"]


def test_a_taken_port_names_who_has_it_and_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(preflight.NotPossible, match=rf"port {port}.*HTTP API.*pid {os.getpid()}.*--port"):
            preflight.check_port("127.0.0.1", port, "the HTTP API", "--port")
    preflight.check_port("127.0.0.1", port, "the HTTP API", "--port")
    preflight.check_port("127.0.0.1", 0, "the HTTP API", "--port")


def test_both_on_one_port_and_a_foreign_address() -> None:
    settings = Settings()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings.gateway.port = settings.metrics.port = free.getsockname()[1]
    with pytest.raises(preflight.NotPossible, match="both want port"):
        preflight.check_ports(settings)
    with pytest.raises(preflight.NotPossible, match=r"cannot listen on 192\.0\.2\.1"):
        preflight.check_port("192.0.2.1", settings.gateway.port, "the HTTP API", "--port")


def test_pools_that_do_not_fit_name_what_would(tmp_path: Path) -> None:
    settings = Settings()
    settings.worker.shm_dir = str(tmp_path)
    settings.worker.kv_memory_mb = 1 << 40
    with pytest.raises(preflight.NotPossible, match=r"2 KV pools.*--kv-memory-mb \d+"):
        preflight.check_space(settings, 2)
    settings.worker.kv_memory_mb = 1
    assert preflight.check_space(settings, 2) == []


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("127.0.0.1", "", 0), ("0.0.0.0", "", 1), ("0.0.0.0", "k", 0)]
)
def test_an_open_api_without_a_key_is_warned_of(host: str, key: str, warned: int) -> None:
    settings = Settings()
    settings.gateway.host, settings.gateway.api_key = host, key
    assert bool(preflight.open_to_all(settings)) is bool(warned)
