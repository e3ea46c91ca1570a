"""The processes of one machine as a whole: from the bus up to `ready`, and down again in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path

from baton.bus.connection import Bus
from baton.bus.directory import Directory
from baton.bus.errors import BusRefused
from baton.bus.server import EmbeddedServer
from baton.cli.supervisor import plan, probe
from baton.cli.supervisor.backoff import RestartPolicy
from baton.cli.supervisor.child import Child, GaveUp
from baton.cli.supervisor.display import Display, Row
from baton.cli.supervisor.rundir import RunDir
from baton.config.settings import BusSettings, Settings
from baton.kvcache.pool import remove_stale
from baton.protocol.liveness import Heartbeat, State

BUS_CHECK_S = 0.1
PATIENCE_S = 30.0
STAGE_S = 2.0  # the least that each stage of a stop is given, even when the grace is used up


class Cluster:
    """One run of `baton up`."""

    def __init__(
        self,
        settings: Settings,
        *,
        prefill: int,
        decode: int,
        own_bus: bool,
        display: Display,
        batch: int = 1,
    ) -> None:
        self.settings = settings
        self.workers = prefill, decode
        self.batch = batch
        self.own_bus = own_bus
        self.display = display
        self.children: dict[str, Child] = {}
        self.gateway_url = ""
        self._beats: dict[str, Heartbeat] = {}
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure = ""
        self._server: EmbeddedServer | None = None

    async def run(self) -> int:
        """Everything, until a signal or a failure. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup baton up
                loop.add_signal_handler(number, self._signal)
        run = RunDir()
        server = EmbeddedServer() if self.own_bus else None
        self._server = server
        try:
            bus_settings = await asyncio.to_thread(self._start_bus, server, run.path)
            run.info.nats_url, run.info.nats_user = bus_settings.url, bus_settings.user
            run.info.nats_password, run.info.shm_dir = bus_settings.password, self.settings.worker.shm_dir
            run.info.model, run.info.api_key = self.settings.model.name, self.settings.gateway.api_key
            run.write()
            bus = await Bus.connect(bus_settings, name=f"supervisor-{os.getpid()}")
            try:
                await self._supervise(bus, bus_settings, run)
            finally:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(bus.close(), STAGE_S)
        finally:
            try:
                if server is not None:
                    await asyncio.to_thread(server.stop)
                _remove_pools(self.settings.worker.shm_dir)
            finally:
                run.remove()
        if self._failure:
            self.display.say(f"error: {self._failure}")
            return 1
        self.display.say("stopped; nothing of it is left running")
        return 0

    def _signal(self) -> None:
        if self._over.is_set():
            self._hurry.set()
        self._over.set()
        self._changed.set()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._over.set()
        self._changed.set()

    def _start_bus(self, server: EmbeddedServer | None, directory: Path) -> BusSettings:
        if server is None:
            return self.settings.bus
        user, password = "baton", secrets.token_urlsafe(24)
        kept = self.settings.bus.store_dir
        store = Path(kept).expanduser().resolve() if kept else None
        url = server.start(directory / "nats", user=user, password=password, store=store)
        return BusSettings(url=url, user=user, password=password)

    async def _supervise(self, bus: Bus, bus_settings: BusSettings, run: RunDir) -> None:
        prefill, decode = self.workers
        cores = plan.usable_cores()
        threads = plan.threads_each(self.settings, prefill + decode, cores)
        made = plan.specs(
            self.settings,
            bus_settings,
            prefill=prefill,
            decode=decode,
            threads=threads,
            environ=os.environ,
            batch=self.batch,
        )
        self.display.say(f"starting {plan.describe(made, threads, cores)}")
        self.children = {
            spec.id: Child(spec, say=self.display.say, line=self.display.line, changed=self._refresh)
            for spec in made
        }
        directory = Directory(bus, model=None)
        directory.subscribe(self._beat)
        async with asyncio.TaskGroup() as group:
            followers = [group.create_task(directory.run())]
            if self._server is not None:
                followers.append(group.create_task(self._keep_bus(bus, self._server)))
            for child in self.children.values():
                group.create_task(self._keep(child))
            try:
                if await self._all_ready() and await self._try_out(bus, run):
                    await self._over.wait()
            finally:
                self.display.settle()
                await self._stop()
                for task in followers:
                    task.cancel()

    async def _keep(self, child: Child) -> None:
        try:
            await child.run()
        except GaveUp as error:
            self._fail(str(error))

    async def _keep_bus(self, bus: Bus, server: EmbeddedServer) -> None:
        """Starts the bus again when it dies; the services wait for it and find it where it was."""
        policy = RestartPolicy()
        loop = asyncio.get_running_loop()
        policy.ready(loop.time())
        lost = asyncio.Event()
        bus.on_change(lambda up: None if up else lost.set())
        while True:
            await lost.wait()
            if bus.up.is_set():
                lost.clear()
            elif server.pid is None:
                delay = policy.died(loop.time(), "") or 0.0
                when = f"in {delay:g} s" if delay else "at once"
                self.display.say(f"nats-server died; starting it again {when}")
                await asyncio.sleep(delay)
                try:
                    await asyncio.to_thread(server.stop)
                    await asyncio.to_thread(server.restart)
                except BusRefused as error:
                    self._fail(f"the bus cannot be started again: {error}")
                    return
                policy.ready(loop.time())
            await asyncio.sleep(BUS_CHECK_S)

    def _beat(self, beat: Heartbeat, kind: str) -> None:
        child = self.children.get(beat.id)
        if child is None or beat.pid != child.pid:
            return
        self._beats[beat.id] = beat
        if beat.state == State.READY and kind != "left":
            child.heartbeat(beat.pid)
        if beat.role == "gateway" and beat.url:
            self.gateway_url = beat.url
        self._refresh()

    def _refresh(self) -> None:
        self._changed.set()
        self.display.rows([self._row(child) for child in self.children.values()])

    def _row(self, child: Child) -> Row:
        beat = self._beats.get(child.spec.id)
        known = beat if beat is not None and beat.pid == child.pid else None
        if child.left:
            state = "left"
        elif known is not None:
            state = str(known.state)
        else:
            state = "restarting" if child.restarts else "starting"
        return Row(child.spec.id, state, known.note if known else "", child.pid, child.restarts)

    async def _all_ready(self) -> bool:
        """Waits until every process has said that it is ready. False: told to stop before that."""
        while not self._over.is_set():
            missing = [child.spec.id for child in self.children.values() if not child.ready]
            if not missing:
                return True
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), PATIENCE_S)
            except TimeoutError:
                notes = [f"{id} ({self._beats[id].note})" if self._note(id) else id for id in missing]
                self.display.say(f"still waiting for {', '.join(notes)}")
        return False

    def _note(self, id: str) -> str:
        return self._beats[id].note if id in self._beats else ""

    async def _try_out(self, bus: Bus, run: RunDir) -> bool:
        """The first request. True once it is answered and `ready` is said."""
        settings = self.settings
        words = settings.router.local_prefill_tokens + 16
        if settings.model.max_context:
            words = min(words, settings.model.max_context // 4)
        trial = asyncio.ensure_future(
            probe.first_request(
                bus,
                self.gateway_url,
                model=settings.model.name,
                api_key=settings.gateway.api_key,
                words=words,
            )
        )
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({trial, over}, return_when=asyncio.FIRST_COMPLETED)
            if not trial.done():
                return False
            took, timing = trial.result()
        except probe.NoAnswer as error:
            self._fail(f"all services are up, but a first request got no answer: {error}")
            return False
        finally:
            trial.cancel()
            over.cancel()
        self.display.settle()
        self.display.say(probe.describe(took, timing))
        if not timing.handoff_bytes:
            self.display.say(
                "note: no KV went from prefill to decode in it (see router.local_prefill_tokens)"
            )
        run.info.gateway_url = self.gateway_url
        run.write()
        self.display.say(_ready(self.gateway_url, settings))
        return True

    async def _stop(self) -> None:
        """Ends all processes, the outermost first, within the grace; at once on a second signal."""
        deadline = asyncio.get_running_loop().time()
        if not self._failure:
            self.display.say("stopping: what runs is finished first (again to stop at once)")
            deadline += self.settings.worker.grace_ms / 1_000 + STAGE_S
        in_order = asyncio.ensure_future(self._stop_in_order(deadline))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({in_order, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not in_order.done():
            for child in self.children.values():
                child.kill()
        await in_order

    async def _stop_in_order(self, deadline: float) -> None:
        for roles in plan.STOPPED:
            left = max(STAGE_S, deadline - asyncio.get_running_loop().time())
            stage = [child for child in self.children.values() if child.spec.role in roles]
            gone = await asyncio.gather(*(child.stop(left) for child in stage))
            for child, clean in zip(stage, gone, strict=True):
                if not clean and not self._hurry.is_set():
                    self.display.say(f"{child.spec.id} did not leave within {left:.0f} s and was killed")


def _remove_pools(directory: str) -> None:
    """KV pools whose owner was killed; an owner that leaves in order removes its own."""
    try:
        remove_stale(directory)
    except OSError as error:
        print(f"warning: {directory} could not be searched for left-over KV pools: {error}", file=sys.stderr)


def _ready(url: str, settings: Settings) -> str:
    name = "KEY" if settings.gateway.keys_file or settings.gateway.keys else "BATON_GATEWAY_API_KEY"
    key = f' -H "authorization: Bearer ${name}"' if settings.gateway.api_key else ""
    model = settings.model.name
    return (
        f"ready: {url}  (model {model}; Ctrl-C stops it)\n"
        f"try:   curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} -d "
        f'\'{{"model": "{model}", "stream": true, "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}\'\n'
        "or:    baton chat   (in another terminal)"
    )
