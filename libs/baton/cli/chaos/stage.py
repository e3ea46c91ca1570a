"""A cluster of real processes that can be hurt: killed, stopped, drained, cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil

from baton.bus.connection import Bus
from baton.bus.directory import Directory
from baton.bus.server import EmbeddedServer
from baton.cli.chaos.proxy import Proxy
from baton.cli.supervisor.child import Child, Spec
from baton.config.environ import to_environ
from baton.config.settings import BusSettings, Settings
from baton.kvcache.pool import PREFIX, SUFFIX
from baton.protocol.liveness import Heartbeat, Role, State

START_S = 90.0
WORKERS = (Role.PREFILL, Role.DECODE)
STOP_ORDER = (Role.GATEWAY, Role.TOKENIZER, *WORKERS, Role.ROUTER, Role.KVSTORE, Role.METRICS)


class StageError(Exception):
    """The cluster does not do what the scenario needs."""


class Stage:
    """`counts[role]` processes of each role, supervised as `baton up` does it, and a bus of its own."""

    def __init__(
        self, settings: Settings, counts: dict[Role, int], folder: Path, log: Path, *, proxied: bool = False
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.server = EmbeddedServer()
        self.children: dict[str, Child] = {}
        self.proxies: list[Proxy] = []
        self._counts = counts
        self._proxied = proxied
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._log = log.open("a")
        self.directory: Directory
        self._bus: Bus

    async def start(self) -> None:
        """Returns when every process is ready.

        Raises:
            StageError: they are not in time.
        """
        user, password = "chaos", secrets.token_urlsafe(16)
        url = await asyncio.to_thread(self.server.start, self.folder / "nats", user=user, password=password)
        self._bus_settings = BusSettings(url=url, user=user, password=password)
        self._bus = await Bus.connect(self._bus_settings, name="chaos")
        self.directory = Directory(self._bus, model=None)
        self.directory.subscribe(self._beat)
        self._following = asyncio.create_task(self.directory.run())
        for role, count in self._counts.items():
            for number in range(count):
                self._launch(await self._spec(role, f"{role}-{number}"))
        await self.wait_ready(START_S)

    async def _spec(self, role: Role, name: str) -> Spec:
        worker = self.settings.worker
        if self._proxied and role is Role.PREFILL:
            port = _free_port()
            proxy = Proxy(port)
            await proxy.start()
            self.proxies.append(proxy)
            worker = msgspec.structs.replace(
                worker, tcp_port=port, tcp_announce=f"127.0.0.1:{proxy.port}", transports=["tcp"]
            )
        shm = self.folder / "shm"
        shm.mkdir(exist_ok=True)
        worker = msgspec.structs.replace(worker, shm_dir=str(shm))
        gateway = msgspec.structs.replace(self.settings.gateway, port=0)
        metrics = msgspec.structs.replace(self.settings.metrics, port=0)
        settings = msgspec.structs.replace(
            self.settings, bus=self._bus_settings, worker=worker, gateway=gateway, metrics=metrics
        )
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environ |= to_environ(settings) | {"BATON_SUPERVISED": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        command = (sys.executable, "-P", "-m", "baton.cli.main", "serve", role.value, "--id", name)
        return Spec(role=role.value, id=name, command=command, environ=environ)

    def _launch(self, spec: Spec) -> None:
        child = Child(spec, say=self._say, line=self._line, changed=_nothing)
        self.children[spec.id] = child
        self._tasks[spec.id] = asyncio.create_task(child.run(), name=spec.id)

    def _say(self, text: str) -> None:
        self._line("chaos", text)

    def _line(self, id: str, text: str) -> None:
        print(f"{time.monotonic():.3f} [{id}] {text}", file=self._log, flush=True)

    def _beat(self, beat: Heartbeat, kind: str) -> None:
        child = self.children.get(beat.id)
        if child is not None and kind != "left" and beat.state is State.READY:
            child.heartbeat(beat.pid)

    # --- looking -------------------------------------------------------------------------------------

    def beats(self, role: Role) -> list[Heartbeat]:
        """Live processes of a role that take work and are the ones running now."""
        return [beat for beat in self.directory.live(role) if beat.pid == self.pid(beat.id)]

    def pid(self, id: str) -> int:
        """Of the process that runs under this id now; 0: none does."""
        child = self.children.get(id)
        return child.pid if child is not None else 0

    def ids(self, role: Role) -> list[str]:
        return [child.spec.id for child in self.children.values() if child.spec.role == role.value]

    def gateways(self) -> list[str]:
        """URLs of gateways that can serve now."""
        return [beat.url for beat in self.beats(Role.GATEWAY) if beat.url]

    async def wait_ready(self, timeout_s: float) -> None:
        """Until every process that should run is ready, and a request would find its way."""
        if not await self.directory.wait_for(lambda _: not self._missing(), timeout_s):
            raise StageError(
                f"not ready in {timeout_s:g} s: {', '.join(self._missing())}; see {self._log.name}"
            )

    def _missing(self) -> list[str]:
        for id, task in self._tasks.items():
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise StageError(f"{id}: {task.exception()}")
        ready = {beat.id for role in self._counts for beat in self.beats(role)}
        missing = [id for id in self.children if id not in ready]
        if not missing and not any(beat.routable for beat in self.beats(Role.TOKENIZER)):
            missing.append("a tokenizer that can route")
        return missing

    def fingerprint(self) -> str:
        """Of what the workers compute with."""
        workers = [beat.worker for role in WORKERS for beat in self.beats(role)]
        return next((worker.fingerprint for worker in workers if worker is not None), "")

    def held(self) -> dict[str, int]:
        """KV blocks and sequences that workers hold, by id, as their last heartbeats say."""
        held = {}
        for role in WORKERS:
            for beat in self.directory.live(role, ready=False):
                if beat.load is not None:
                    count = beat.load.blocks_used + beat.load.running + beat.load.waiting
                    if count:
                        held[beat.id] = count
        return held

    def pools(self) -> int:
        """KV pool files in shared memory."""
        return len(list((self.folder / "shm").glob(f"{PREFIX}*{SUFFIX}")))

    def memory(self) -> dict[str, int]:
        """Resident bytes by "id (pid)", what is shared left out: pages of KV pools fill with use."""
        sizes = {}
        for id, child in self.children.items():
            with contextlib.suppress(psutil.Error):
                info = psutil.Process(child.pid).memory_info()
                sizes[f"{id} ({child.pid})"] = info.rss - getattr(info, "shared", 0)
        return sizes

    # --- hurting -------------------------------------------------------------------------------------

    def signal(self, id: str, number: signal.Signals) -> None:
        pid = self.pid(id)
        if not pid:
            raise StageError(f"{id} does not run")
        self._say(f"{number.name} to {id} ({pid})")
        os.kill(pid, number)

    async def freeze(self, id: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.signal(id, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.signal(id, signal.SIGCONT)

    async def restart(self, id: str, timeout_s: float) -> None:
        """SIGTERM, as a deployment would: it drains and leaves; then its successor is started.

        Raises:
            StageError: it does not leave in time, or not with exit code 0.
        """
        child = self.children[id]
        self.signal(id, signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._tasks[id])
        except TimeoutError as error:
            raise StageError(f"{id} did not leave within {timeout_s:g} s") from error
        if not child.left:
            raise StageError(f"{id} did not leave in good order")
        self._launch(child.spec)

    async def outage(self, seconds: float) -> None:
        """The NATS server is gone for a while."""
        self._say(f"nats-server gone for {seconds:g} s")
        await asyncio.to_thread(self.server.stop)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.server.restart)

    # --- the end -------------------------------------------------------------------------------------

    async def stop(self) -> int:
        """Ends everything in order; returns how many processes had to be killed."""
        killed = 0
        for role in STOP_ORDER:
            stage = [self.children[id] for id in self.ids(role)]
            clean = await asyncio.gather(*(child.stop(15.0) for child in stage))
            killed += clean.count(False)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for proxy in self.proxies:
            await proxy.stop()
        if self._following is not None:
            self._following.cancel()
            await self._bus.close()
        await asyncio.to_thread(self.server.stop)
        self._log.close()
        return killed


@contextlib.asynccontextmanager
async def staged(
    settings: Settings,
    counts: dict[Role, int],
    folder: Path,
    log: Path,
    *,
    proxied: bool = False,
    done: Callable[[int], None] = lambda killed: None,
) -> AsyncIterator[Stage]:
    """A ready `Stage`; `done` is told how many processes had to be killed at its end."""
    stage = Stage(settings, counts, folder, log, proxied=proxied)
    try:
        await stage.start()
        yield stage
    finally:
        done(await stage.stop())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _nothing() -> None:
    """Nothing is shown."""
