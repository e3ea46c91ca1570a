"""The host of every service: real processes on a real NATS server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.bus.connection import Bus, CallRejected, NoResponder
from baton.bus.inbox import Inbox
from baton.bus.server import EmbeddedServer
from baton.config.environ import to_environ
from baton.config.settings import BusSettings, Settings
from baton.protocol import subjects
from baton.protocol.base import Message
from baton.protocol.codec import Codec
from baton.protocol.liveness import Ask, Heartbeat, Role, State
from baton.protocol.request import Accepted
from baton.protocol.stats import Snapshot
from baton.protocol.work import Cancel, Drain
from baton.service.figures import BusFigures

PROBE = Path(__file__).parent / "probe_service.py"
ACCEPTED = Codec(Accepted)
WITHIN_S = 15.0  # a process starts in one second, on a busy machine in some more


@dataclass
class Probe:
    """A probe process, and what it says on the bus."""

    id: str
    process: asyncio.subprocess.Process
    beats: Inbox
    heard: list[Heartbeat] = field(default_factory=list)

    async def beat(self, state: State | None = None) -> Heartbeat:
        """The next heartbeat, or the next one in a state."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                beat: Heartbeat = (await self.beats.get()).message
                self.heard.append(beat)
                if state is None or beat.state == state:
                    return beat

    async def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        async with asyncio.timeout(WITHIN_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()

    def states(self) -> list[str]:
        while (late := self.beats.get_nowait()) is not None:
            self.heard.append(late.message)
        return list(dict.fromkeys(beat.state for beat in self.heard))


Start = Callable[..., Awaitable[Probe]]


@pytest.fixture
async def start(nats_server: BusSettings, bus: Bus) -> AsyncIterator[Start]:
    """Starts probes with the environment given, on the session's server unless told otherwise."""
    probes: list[Probe] = []

    async def start(command: list[str] | None = None, **environ: str) -> Probe:
        id = f"probe-{os.getpid()}-{len(probes)}"
        beats = await bus.inbox(subjects.heartbeat("", Role.KVSTORE, id), Heartbeat)
        settings = to_environ(Settings(bus=nats_server))
        process = await asyncio.create_subprocess_exec(
            *(command or [sys.executable, str(PROBE)]),
            id,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_plain_environment() | settings | environ,
        )
        probes.append(Probe(id, process, beats))
        return probes[-1]

    yield start
    for probe in probes:
        if probe.process.returncode is None:
            probe.process.kill()
            await probe.process.communicate()


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "PROBE_"))}


async def test_a_state_file_that_cannot_be_written_ends_no_service(start: Start, tmp_path: Path) -> None:
    probe = await start(BATON_SERVICE_STATE_FILE=str(tmp_path / "nowhere" / "state"))
    first = await probe.beat(State.READY)
    while (await probe.beat()).seq < first.seq + 2:
        pass
    probe.process.terminate()
    code, _, err = await probe.ended()
    assert code == 0 and "health checks will fail" in err


async def test_sigterm_drains_says_so_and_exits_0(start: Start) -> None:
    probe = await start(PROBE_DRAIN_S="0.3")
    ready = await probe.beat(State.READY)
    assert ready.pid == probe.process.pid and ready.routable and ready.version
    probe.process.terminate()
    draining = await probe.beat(State.DRAINING)
    assert not draining.routable
    code, out, err = await probe.ended()
    assert (code, out.split()) == (0, ["draining", "drained", "stopped"]), err
    assert probe.states() == ["ready", "draining", "stopped"] or probe.states() == [
        "starting",
        "ready",
        "draining",
        "stopped",
    ]


async def test_a_drain_message_is_an_orderly_end_with_its_own_grace(start: Start, bus: Bus) -> None:
    probe = await start(PROBE_DRAIN_S="60")
    ready = await probe.beat(State.READY)
    await bus.call(ready.subject, Drain(grace_ms=100), ACCEPTED)
    code, out, err = await probe.ended()
    assert (code, out.split()) == (0, ["draining", "stopped"])
    assert "not drained after 0.1 s" in err


async def test_a_second_signal_cuts_the_drain_short(start: Start) -> None:
    probe = await start(PROBE_DRAIN_S="60")
    await probe.beat(State.READY)
    probe.process.send_signal(signal.SIGINT)
    await probe.beat(State.DRAINING)
    probe.process.send_signal(signal.SIGINT)
    code, out, _ = await probe.ended()
    assert (code, out.split()) == (1, ["draining", "stopped"])
    assert probe.states()[-1] == "stopped"


async def test_heartbeats_come_each_second_and_at_once_when_asked(start: Start, bus: Bus) -> None:
    probe = await start()
    first = await probe.beat(State.READY)
    loop = asyncio.get_running_loop()
    before = loop.time()
    beats = [await probe.beat() for _ in range(3)]
    assert 0.9 < loop.time() - before < 6  # one for an `Ask`, and the next full second may be near
    assert [beat.seq for beat in beats] == [first.seq + n for n in (1, 2, 3)]
    assert beats[-1].load is not None and beats[0].load is not None
    assert beats[-1].load.running == beats[0].load.running + 2, "refreshed before each heartbeat"
    asked = loop.time()
    await bus.publish(subjects.ask(), Ask())
    await probe.beat()
    assert loop.time() - asked < 0.8


async def test_figures_are_sent_and_the_last_ones_before_the_end(start: Start, bus: Bus) -> None:
    probe = await start(BATON_METRICS_INTERVAL_MS="60000")
    inbox = await bus.inbox(subjects.stats(probe.id), Snapshot)
    ready = await probe.beat(State.READY)
    for _ in range(3):
        await bus.call(ready.subject, Cancel(request="r", attempt=1), ACCEPTED)
    probe.process.terminate()
    await probe.ended()
    async with asyncio.timeout(WITHIN_S):
        snapshots = [(await inbox.get()).message]
        while (more := inbox.get_nowait()) is not None:
            snapshots.append(more.message)
    last = {family.name: family for family in snapshots[-1].families}
    assert last["baton_probe_orders"].samples[0].value == 3
    assert snapshots[-1].epoch == ready.epoch


async def test_a_failing_task_ends_the_process_with_1_and_one_traceback(start: Start, bus: Bus) -> None:
    probe = await start()
    ready = await probe.beat(State.READY)
    await bus.publish(ready.subject, Cancel(request="r", attempt=1, reason="fail"))
    stopped = await probe.beat(State.STOPPED)
    assert "ordered to fail" in stopped.note
    code, out, err = await probe.ended()
    assert (code, out.split()) == (1, ["stopped"])
    assert err.count("Traceback (most recent call last)") == 1 and "KeyError: 'ordered to fail'" in err


@pytest.mark.parametrize(("how", "tracebacks"), [("fail", 1), ("refuse", 0)])
async def test_a_failed_start(start: Start, how: str, tracebacks: int) -> None:
    probe = await start(PROBE_START=how)
    code, _, err = await probe.ended()
    assert code == 1 and err.count("Traceback") == tracebacks
    assert probe.states()[-1] == "stopped" and "ready" not in probe.states()
    if how == "refuse":
        assert err.splitlines()[-1].endswith("port 1 is taken: set another")


async def test_a_signal_ends_a_start_that_hangs(start: Start) -> None:
    probe = await start(PROBE_START="hang")
    assert probe.process.stdout is not None
    async with asyncio.timeout(WITHIN_S):
        assert await probe.process.stdout.readline() == b"starting\n"
    probe.process.terminate()
    code, out, _ = await probe.ended()
    assert (code, out.split()) == (0, ["stopped"])


async def test_a_malformed_message_is_counted_and_does_no_harm(start: Start, bus: Bus) -> None:
    class Nonsense(Message):
        words: str

    probe = await start(BATON_METRICS_INTERVAL_MS="100")
    inbox = await bus.inbox(subjects.stats(probe.id), Snapshot)
    ready = await probe.beat(State.READY)
    await bus.publish(ready.subject, Nonsense(words="?"))
    await bus.publish(ready.subject, Nonsense(words="?"))
    await bus.call(ready.subject, Cancel(request="r", attempt=1), ACCEPTED)
    counted: dict[str, float] = {}
    async with asyncio.timeout(WITHIN_S):
        while counted.get("ctl") != 2:
            snapshot: Snapshot = (await inbox.get()).message
            family = next(family for family in snapshot.families if family.name == "baton_malformed_messages")
            counted = {sample.labels["subject"]: sample.value for sample in family.samples}


async def test_what_an_inbox_counted_stays_when_it_is_closed(bus: Bus) -> None:
    figures = BusFigures(bus)

    def counted() -> dict[str, float]:
        family = next(family for family in figures.collect() if family.name == "baton_malformed_messages")
        return {sample.labels["subject"]: sample.value for sample in family.samples}

    inbox = await bus.inbox(subjects.tokens("m", "t", 1), Ask)
    await bus.publish(inbox.subject, Drain())
    with pytest.raises(CallRejected):
        await bus.call(inbox.subject, Drain(), ACCEPTED)
    assert counted() == {"tokens": 2, "answer": 0}
    await bus.publish(inbox.subject, Drain())
    with pytest.raises(CallRejected):
        await bus.call(inbox.subject, Drain(), ACCEPTED)
    inbox.close()
    assert counted() == counted() == {"tokens": 4, "answer": 0}
    other = await bus.inbox(subjects.tokens("m", "u", 1), Ask)
    with pytest.raises(CallRejected):
        await bus.call(other.subject, Drain(), ACCEPTED)
    assert counted() == {"tokens": 5, "answer": 0}


async def test_the_death_of_its_supervisor_ends_it(start: Start) -> None:
    supervisor = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], env=os.environ | {'BATON_SUPERVISED': str(os.getpid())})\n"
        "time.sleep(60)\n"
    )
    probe = await start([sys.executable, "-c", supervisor, sys.executable, str(PROBE)])
    ready = await probe.beat(State.READY)
    assert ready.pid != probe.process.pid
    probe.process.kill()
    stopped = await probe.beat(State.STOPPED)
    assert stopped.pid == ready.pid
    _, out, err = await probe.ended()  # the pipes close when the child has ended too
    assert out.split() == ["stopped"] and "has gone" in err


async def test_a_thread_that_hangs_does_not_keep_the_process(start: Start, bus: Bus) -> None:
    probe = await start(BATON_WORKER_GRACE_MS="1", PROBE_WATCHDOG_S="0.5")
    ready = await probe.beat(State.READY)
    await bus.publish(ready.subject, Cancel(request="r", attempt=1, reason="hang a thread"))
    await bus.call(ready.subject, Drain(), ACCEPTED)
    code, _, err = await probe.ended()
    assert code == 4 and "giving up" in err


async def test_nats_away_at_the_start_and_then_coming(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    settings = Settings(bus=BusSettings(url=f"nats://127.0.0.1:{port}", user="u", password="secret-p"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROBE),
        "late",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_plain_environment() | to_environ(settings),
    )
    assert process.stderr is not None
    async with asyncio.timeout(WITHIN_S):
        first_line = (await process.stderr.readline()).decode()
    assert "waiting for the NATS server" in first_line
    server = EmbeddedServer()
    await asyncio.to_thread(server.start, tmp_path / "nats", port=port, user="u", password="secret-p")
    try:
        bus = await Bus.connect(settings.bus, name="test")
        inbox = await bus.inbox(subjects.heartbeat("", Role.KVSTORE, "late"), Heartbeat)
        async with asyncio.timeout(WITHIN_S):
            async for delivery in inbox:
                if delivery.message.state == State.READY:
                    break
        subject = delivery.message.subject
        process.terminate()
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
        assert process.returncode == 0 and b"stopped" in out and b"secret-p" not in err
        with pytest.raises(NoResponder):
            await bus.call(subject, Cancel(request="r", attempt=1), ACCEPTED)
        await bus.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_wrong_credentials_are_one_clear_line(start: Start) -> None:
    probe = await start(BATON_BUS_USER="nobody", BATON_BUS_PASSWORD="hush")
    code, _, err = await probe.ended()
    assert code == 1 and "Traceback" not in err and "hush" not in err
    assert "BATON_BUS_USER" in err.splitlines()[-1]
