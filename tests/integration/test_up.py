"""`baton up` with real processes on the mock engine: up, used, hurt, and gone without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from baton.bus.connection import Bus, BusRefused
from baton.bus.server import EmbeddedServer
from baton.cli.http import Api, ApiError
from baton.cli.supervisor.rundir import RunInfo, read_run
from baton.config.settings import BusSettings

BATON = [sys.executable, "-P", "-m", "baton.cli.main"]
START_S = 60.0


class Up:
    """One `baton up` of our own, in a folder of its own."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.folder = folder
        self.shm = folder / "shm"
        self.shm.mkdir()
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.environ |= {"XDG_RUNTIME_DIR": str(folder), "BATON_GATEWAY_API_KEY": "a-key", **environ}
        command = [
            *BATON,
            "up",
            "--engine",
            "mock",
            "--port",
            "0",
            "--metrics-port",
            "0",
            "--kv-memory-mb",
            "16",
        ]
        self.process = subprocess.Popen(
            [*command, "--worker-shm-dir", str(self.shm), *flags],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._news.put(line)
        self._news.put(None)

    def wait_for(self, text: str, timeout_s: float = START_S) -> None:
        """Until a line not yet waited for holds `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._news.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"{text!r} was not said:\n" + "\n".join(self.lines[-60:]))
            if text in line:
                return

    @property
    def run(self) -> RunInfo:
        found = read_run(self.folder / f"baton-{self.process.pid}")
        assert found is not None
        return found

    @property
    def bus(self) -> BusSettings:
        return BusSettings(url=self.run.nats_url, user=self.run.nats_user, password=self.run.nats_password)

    def baton(self, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
        """Another command of ours, which is to find this cluster by itself."""
        return subprocess.run(
            [*BATON, *words],
            env=self.environ,
            input=said,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def services(self) -> dict[str, dict[str, object]]:
        done = self.baton("status", "--json")
        assert done.returncode == 0, done.stderr
        beats = [json.loads(line) for line in done.stdout.splitlines()]
        return {beat["id"]: beat for beat in beats}

    def ask(self, prompt: str = "hello", tokens: int = 4) -> str:
        body = {"model": "mock", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = Api(self.run.gateway_url, api_key="a-key").post("/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == tokens
        return str(answer["choices"][0]["text"])

    def family(self) -> list[psutil.Process]:
        """Itself and everything it has started."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def end(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def assert_nothing_left(up: Up, family: list[psutil.Process], run: RunInfo, within_s: float = 0.0) -> None:
    """No process, no port, no run folder, no shared memory."""
    _, alive = psutil.wait_procs(family, timeout=within_s)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for url in (run.nats_url, run.gateway_url):
        address = urlsplit(url)
        with socket.socket() as probe:
            assert probe.connect_ex((address.hostname, address.port)) != 0
    assert list(up.shm.iterdir()) == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), "--prefill", "2", "--decode", "2")
    try:
        up.wait_for("ready: http")
        yield up
    finally:
        up.close()


def test_ready_is_said_after_a_request_went_the_whole_way(cluster: Up) -> None:
    [line] = [line for line in cluster.lines if "went the whole way" in line]
    assert "of KV handed from prefill-" in line
    assert "over shm in" in line
    answer = cluster.ask()
    assert len(answer) == 4
    assert cluster.ask() == answer
    with pytest.raises(ApiError) as refused:
        Api(cluster.run.gateway_url).get("/v1/models")
    assert refused.value.status == 401


def test_status_shows_one_process_a_service_and_worker(cluster: Up) -> None:
    services = cluster.services()
    roles = ("gateway", "tokenizer", "router", "prefill", "decode", "kvstore", "metrics", "batch")
    names = {f"{role}-0" for role in roles}
    assert set(services) == names | {"prefill-1", "decode-1"}
    assert {beat["state"] for beat in services.values()} == {"ready"}
    pids = {int(str(beat["pid"])) for beat in services.values()}
    assert len(pids) == 10
    assert pids <= {process.pid for process in cluster.family()}
    table = cluster.baton("status")
    assert table.returncode == 0
    for name in names:
        assert name in table.stdout


def test_no_secret_on_a_command_line_and_only_its_user_reads_the_run_file(cluster: Up) -> None:
    secret = cluster.run.nats_password
    assert len(secret) > 20
    for process in cluster.family():
        line = " ".join(process.cmdline())
        assert secret not in line
        assert "a-key" not in line
    path = cluster.folder / f"baton-{cluster.process.pid}" / "run.json"
    assert path.stat().st_mode & 0o077 == 0
    assert secret not in "\n".join(cluster.lines)


async def test_the_bus_refuses_who_has_no_credential(cluster: Up) -> None:
    with pytest.raises(BusRefused):
        await Bus.connect(BusSettings(url=cluster.run.nats_url), name="nobody", wait_s=5)
    bus = await Bus.connect(cluster.bus, name="somebody", wait_s=5)
    await bus.close()


def test_chat_from_a_pipe_and_from_the_command_line(cluster: Up) -> None:
    greedy = ("chat", "--max-tokens", "5", "--temperature", "0")
    piped = cluster.baton(*greedy, said="hello there\n")
    assert piped.returncode == 0, piped.stderr
    assert len(piped.stdout) == 6  # the mock's tokens are bytes; and a newline
    again = cluster.baton(*greedy, "hello", "there")
    assert again.stdout == piped.stdout
    assert cluster.baton("chat", said="").returncode == 2


def test_doctor_finds_nothing_wrong_and_probes(cluster: Up) -> None:
    done = cluster.baton("doctor", "--engine", "mock", "--kv-memory-mb", "16")
    assert done.returncode == 0, done.stdout
    assert f"{cluster.run.gateway_url} is ready" in done.stdout
    assert cluster.baton("doctor", "--probe", "decode-0").returncode == 0
    assert cluster.baton("doctor", "--probe", cluster.run.gateway_url).returncode == 0
    assert cluster.baton("doctor", "--probe", "decode-9").returncode == 1
    assert cluster.baton("doctor", "--probe", "http://127.0.0.1:1").returncode == 1


def test_a_killed_worker_is_started_again_and_the_others_go_on(cluster: Up) -> None:
    before = int(str(cluster.services()["decode-1"]["pid"]))
    os.kill(before, signal.SIGKILL)
    cluster.wait_for("decode-1 was ended by SIGKILL; starting it again at once", 10)
    assert len(cluster.ask("while it is away")) == 4
    cluster.wait_for("decode-1 ready", START_S)
    now = cluster.services()["decode-1"]
    assert (now["state"], now["pid"] == before) == ("ready", False)


def test_a_killed_bus_is_started_again_where_it_was(cluster: Up) -> None:
    url = cluster.run.nats_url
    [server] = [process for process in cluster.family() if "nats" in process.name()]
    server.kill()
    cluster.wait_for("nats-server died; starting it again at once", 10)
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(ApiError):
            assert len(cluster.ask("after the bus")) == 4
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert cluster.run.nats_url == url


def test_a_drained_worker_leaves_and_stays_away(cluster: Up) -> None:
    done = cluster.baton("drain", "prefill-1")
    assert done.returncode == 0, done.stderr
    assert "prefill-1 has left" in done.stdout
    cluster.wait_for("prefill-1 was asked to leave, and has", 10)
    assert "prefill-1" not in cluster.services()
    assert len(cluster.ask("the others are here")) == 4
    missing = cluster.baton("drain", "prefill-7")
    assert missing.returncode == 1
    assert "no service prefill-7" in missing.stderr


def test_ctrl_c_then_leaves_nothing(cluster: Up) -> None:
    """The last one to use the cluster, which by now has seen a worker killed and the bus started again."""
    run, family = cluster.run, cluster.family()
    assert len(list(cluster.shm.iterdir())) >= 3
    assert cluster.end(signal.SIGINT) == 0
    assert_nothing_left(cluster, family, run)
    assert not (cluster.folder / f"baton-{run.pid}").exists()
    assert cluster.lines[-1] == "stopped; nothing of it is left running"
    assert not [line for line in cluster.lines if "was killed" in line]


def test_bench_control_prints_what_it_measured(tmp_path: Path) -> None:
    few = ["--requests", "4", "--clients", "2", "--rounds", "1", "--tokens", "16", "--idle", "0.5", "--json"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*BATON, "bench", "control", *few],
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["tokens"]) == (2, 32)
    spent = figures["cpu_s"]
    control = spent["gateway-0"] + spent["tokenizer-0"] + spent["router-0"]
    assert spent["gateway, tokenizer and router"] == pytest.approx(control)
    assert {"prefill-0", "decode-0", "nats-server", "supervisor", "all processes"} < set(spent)
    assert all(0 < value["p50"] <= value["p99"] < 5_000 for value in figures["added_ms"].values())
    assert {"gateway-0", "nats-server", "supervisor"} < set(figures["idle_cpu_percent"])
    assert all(
        megabytes < 120 for id, megabytes in figures["rss_mb"].items() if id not in ("prefill-0", "decode-0")
    )
    assert list(tmp_path.iterdir()) == []


def test_a_bus_of_others_is_left_alone_and_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    server = EmbeddedServer()
    url = server.start(tmp_path / "nats", user="somebody", password="not-a-secret")
    up = Up(
        tmp_path, "--nats", url, "--bus-user", "somebody", "--mock-step-us", "100000",
        BATON_BUS_PASSWORD="not-a-secret",
    )  # fmt: skip
    try:
        up.wait_for("ready: http")
        run, family = up.run, up.family()
        assert run.nats_url == url
        assert not [process for process in family if "nats" in process.name()]
        body = {
            "model": "mock",
            "prompt": "on and on",
            "max_tokens": 10_000,
            "ignore_eos": True,
            "stream": True,
        }
        stream = Api(run.gateway_url, api_key="a-key").stream("/v1/completions", body)
        next(stream)
        up.process.send_signal(signal.SIGTERM)
        up.wait_for("stopping", 10)
        next(stream)  # it goes on while it can
        assert up.process.poll() is None
        began = time.monotonic()
        up.process.send_signal(signal.SIGINT)
        up.process.wait(20)
        assert time.monotonic() - began < 15
        with pytest.raises(ApiError):
            list(stream)
        assert server.pid is not None
        server.stop()
        assert_nothing_left(up, family, run)
    finally:
        up.close()
        server.stop()


@pytest.mark.parametrize("when", ["ready: http", "starting"])
def test_a_killed_supervisor_takes_everything_with_it(tmp_path: Path, when: str) -> None:
    up = Up(tmp_path)
    try:
        up.wait_for(when)
        run, family = up.run, up.family()
        up.process.kill()
        up.process.wait()
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive
        assert (
            subprocess.run([*BATON, "status"], env=up.environ, capture_output=True, check=False).returncode
            == 1
        )
        assert not (up.folder / f"baton-{run.pid}").exists()  # whoever looks next tidies up
    finally:
        up.close()


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        command = [*BATON, "up", "--engine", "mock", "--port", port]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"port {port}, wanted for the HTTP API, is taken by" in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr
    assert "--port" in done.stderr
    assert "starting" not in done.stdout


def test_workers_that_are_none_and_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    for flags, code, said in (
        (["--prefill", "0", "--decode", "0"], 2, "nobody to do the work"),
        (["--port", "0", "--metrics-port", "0", "--model", "no-such-model"], 1, "no-such-model"),
    ):
        command = [*BATON, "up", *flags, "--model-cache-dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == code
        assert said in done.stderr
