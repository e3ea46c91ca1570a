"""Real workers in this process, on a real NATS server, with the mock engine; the test plays the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from baton.bus.connection import Bus
from baton.bus.inbox import Inbox
from baton.bus.streams import News, StreamReceiver
from baton.config.settings import BusSettings, Settings
from baton.kvcache.pull import PullStats
from baton.protocol import subjects
from baton.protocol.base import Message, pack_tokens
from baton.protocol.codec import Codec
from baton.protocol.errors import Failure
from baton.protocol.handoff import Abandon, Commit, Offer, Ready, Renew
from baton.protocol.liveness import Role, State
from baton.protocol.placing import Target
from baton.protocol.request import Accepted, Rejected
from baton.protocol.sampling import SamplingParams, TokenLogprobs
from baton.protocol.sequence import Fork, SequenceState
from baton.protocol.work import Cancel, Ended, Leaving, Move, Resume, Run, TokenBatch, Tokens
from baton.service import heart
from baton.service.base import ServiceHost
from baton.worker.worker import Worker

BLOCK = 16
Make = Callable[[ServiceHost], Any]
_accepted = Codec(Accepted, Rejected)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Letters: the same for the same seed."""
    rng = random.Random(seed * 7_919 + 1)
    return [rng.randrange(97, 123) for _ in range(length)]


async def until(holds: Callable[[], bool], timeout_s: float = 3.0, what: object = None) -> None:
    """Waits until `holds()`; an AssertionError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what() if callable(what) else what or "not in time"
        await asyncio.sleep(0.005)


class Process:
    """One service as its process would run it, with its own connection to the bus."""

    def __init__(
        self,
        bus: Bus,
        role: Role,
        name: str,
        settings: Settings,
        model: str,
        make: Callable[[ServiceHost], Any],
    ) -> None:
        self.bus = bus
        self.host = ServiceHost(role, settings, bus, id=name, model=model)
        self.service = make(self.host)
        self.failure: BaseException | None = None
        self._end = asyncio.Event()
        self._up = asyncio.Event()
        self._stopped = False
        self._task = asyncio.create_task(self._live())

    @property
    def target(self) -> Target:
        return Target(id=self.host.id, epoch=self.host.epoch, subject=self.host.subject)

    async def _live(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(heart.beat(self.host, lambda: None))
                group.create_task(heart.answer_asks(self.host))
                group.create_task(self.host.directory.run())
                await self.service.start(group)
                self._up.set()
                await self._end.wait()
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            return
        except BaseExceptionGroup as group_error:
            self.failure = group_error
        finally:
            self._up.set()

    async def ready(self) -> None:
        await self._up.wait()
        assert self.failure is None, self.failure

    async def kill(self) -> None:
        """As SIGKILL would: from one moment to the next it is gone from the bus, and says nothing."""
        self._stopped = True
        self.bus._client.abort()
        self._end.set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.bus.close()
        await self.service.stop()

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._end.set()
            await self._task
            await self.service.stop()
            await self.bus.close()

    async def drain(self, grace_s: float) -> None:
        """As SIGTERM does it: what runs ends or moves, then it leaves."""
        self.host.enter(State.DRAINING)
        await self.host.announce()
        await self.service.drain(grace_s)
        self.host.enter(State.STOPPED)
        await self.host.announce()
        await self.stop()


class Node(Process):
    """A worker."""

    def __init__(self, bus: Bus, role: Role, name: str, settings: Settings, model: str) -> None:
        super().__init__(bus, role, name, settings, model, Worker)
        self.worker: Worker = self.service

    @property
    def engine(self) -> Any:
        return self.worker._engine

    @property
    def pool(self) -> Any:
        return self.worker._pool

    def count(self, name: str) -> list[object]:
        """A list that grows by one with each call of this method of the scheduler."""
        scheduler, calls = self.engine.scheduler, list[object]()
        method = getattr(scheduler, name)

        def counted(*args: object) -> object:
            calls.append(args)
            return method(*args)

        setattr(scheduler, name, counted)
        return calls

    def idle(self) -> str:
        """What it still holds; empty when that is nothing."""
        worker, engine = self.worker, self.worker._engine
        held = {
            "jobs": len(worker._jobs),
            "inbound": len(worker._inbound),
            "outbound": len(worker._outbound),
            "blocks": engine.pool.used,
            "sequences": len(list(engine.sequences())),
            "reserved": engine.scheduler.reserved,
        }
        return ", ".join(f"{self.host.id}: {count} {what}" for what, count in held.items() if count)


class Player:
    """The tokenizer's part: runs, cancels and resumes, and keeps what comes back of each request."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.bus = bus
        self.id, self.epoch = f"player-{uuid.uuid4().hex[:8]}", time.time_ns()
        self.subject = subjects.tokens(model, self.id, self.epoch)
        self.streams: dict[str, StreamReceiver] = {}
        self.output: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.failures: dict[str, list[Failure]] = {}
        self.items: dict[str, list[Tokens]] = {}
        self.senders: dict[str, set[str]] = {}
        self.leaving: list[Leaving] = []
        self.lose: Callable[[Tokens], bool] = lambda item: False

    async def start(self) -> asyncio.Task[None]:
        self._inbox: Inbox = await self.bus.inbox(self.subject, TokenBatch, Leaving)
        return asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for delivery in self._inbox:
            if isinstance(delivery.message, Leaving):
                self.leaving.append(delivery.message)
                continue
            for item in delivery.message.items:
                if not self.lose(item):
                    self._take(delivery.message.worker, item)

    def _take(self, worker: str, item: Tokens) -> None:
        self.items.setdefault(item.request, []).append(item)
        self.senders.setdefault(item.request, set()).add(worker)
        if item.failure is not None:
            self.failures.setdefault(item.request, []).append(item.failure)
            return
        news = self.streams[item.request].feed(item)
        if isinstance(news, News):
            self.output[item.request] += news.tokens
            self.logprobs[item.request] += news.logprobs

    async def run(
        self,
        node: Node,
        name: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        attempt: int = 0,
        decode: Node | None = None,
        priority: int = 0,
        deadline_ms: int = 60_000,
        salt: str = "",
        choices: int = 1,
    ) -> None:
        """Sends a `Run` of prompt and the output so far; returns once it is accepted.

        Its further `choices` are requests `name.1`, `name.2`, ...
        """
        output = self.output.setdefault(name, [])
        stream = self.streams.setdefault(name, StreamReceiver())
        self.logprobs.setdefault(name, [])
        stream.restart(attempt)
        state = SequenceState(
            request=name,
            attempt=attempt,
            tokens=pack_tokens(tokens + output),
            prompt_len=len(tokens),
            reply_to=self.subject,
            sampling=params,
            logprobs=self.logprobs[name],
            priority=priority,
            salt=salt,
            deadline_ms=deadline_ms,
            delivered=len(output),
        )
        forks = [Fork(f"{name}.{choice}", attempt, choice) for choice in range(1, choices)]
        for fork in forks:
            self.output[fork.request], self.logprobs[fork.request] = [], []
            self.streams[fork.request] = StreamReceiver(attempt)
        message = Run(state=state, decode=decode.target if decode is not None else None, forks=forks)
        await self.call(node, message)

    async def call(self, node: Node, message: Message) -> None:
        await self.bus.call(node.host.subject, message, _accepted, timeout_s=2.0)

    async def cancel(self, name: str, *nodes: Node, attempt: int = 0) -> None:
        for node in nodes:
            await self.bus.publish(node.host.subject, Cancel(request=name, attempt=attempt))

    async def resume(self, node: Node, name: str, attempt: int = 0) -> None:
        start = self.streams[name].next_index
        await self.call(node, Resume(request=name, attempt=attempt, start=start))

    async def move(self, source: Node, target: Node, name: str, *, attempt: int, successor: int) -> None:
        stream = self.streams[name]
        stream.restart(successor)
        await self.call(
            source,
            Move(
                request=name,
                attempt=attempt,
                successor=successor,
                target=target.target,
                start=stream.next_index,
            ),
        )

    async def ended(self, node: Node, name: str, attempt: int = 0) -> None:
        await self.bus.publish(node.host.subject, Ended(request=name, attempt=attempt))

    async def result(self, name: str, timeout_s: float = 10.0) -> list[int]:
        """All output tokens, once the last one is here."""
        await until(
            lambda: self.streams[name].ended, timeout_s, lambda: (name, self.items.get(name, [])[-3:])
        )
        return self.output[name]

    async def failure(self, name: str, timeout_s: float = 5.0) -> Failure:
        await until(lambda: name in self.failures, timeout_s, lambda: f"{name} did not fail")
        return self.failures[name].pop()

    async def tokens(self, name: str, count: int, timeout_s: float = 5.0) -> None:
        await until(lambda: len(self.output[name]) >= count, timeout_s, lambda: self.items.get(name, [])[-3:])


class Rig:
    """A bus, a player, and workers made as the test needs them. Everything must be free at its end."""

    def __init__(self, server: BusSettings, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.model = f"rig-{uuid.uuid4().hex[:8]}"
        self.nodes: list[Node] = []
        self.others: list[Process] = []
        self.player: Player
        self._buses: list[Bus] = []
        self._listening: asyncio.Task[None]
        self._sniffers: list[asyncio.Task[None]] = []

    async def bus(self, name: str) -> Bus:
        return await Bus.connect(self.server, name=name, wait_s=10)

    async def start(self) -> None:
        self._buses.append(await self.bus("player"))
        self.player = Player(self._buses[0], self.model)
        self._listening = await self.player.start()

    def settings(self, **options: Any) -> Settings:
        """Those of this rig; `options` are `<section>__<name>` or names of the worker section."""
        settings = Settings()
        settings.bus = self.server
        settings.model.name = "mock"
        settings.worker.engine = "mock"
        settings.worker.kv_memory_mb = 4
        settings.worker.shm_dir = str(self.folder)
        settings.router.local_prefill_tokens = 0
        settings.mock.step_us, settings.mock.token_us = 300, 5
        for key, value in options.items():
            section, _, option = key.rpartition("__")
            setattr(getattr(settings, section or "worker"), option, value)
        return settings

    async def serve(self, role: Role, make: Make, *, name: str = "", **options: Any) -> Process:
        """One more service of another kind."""
        name = name or f"{role}-{len(self.others)}"
        process = Process(await self.bus(name), role, name, self.settings(**options), self.model, make)
        self.others.append(process)
        await process.ready()
        return process

    async def add(
        self, role: Role, *, name: str = "", transports: Iterable[Any] = ("shm", "tcp"), **options: Any
    ) -> Node:
        """One more worker."""
        settings = self.settings(**options)
        settings.worker.transports = list(transports)
        name = name or f"{role}-{len(self.nodes)}"
        node = Node(await self.bus(name), role, name, settings, self.model)
        self.nodes.append(node)
        await node.ready()
        return node

    async def pair(self, **options: Any) -> tuple[Node, Node]:
        """A prefill and a decode worker."""
        return await self.add(Role.PREFILL, **options), await self.add(Role.DECODE, **options)

    async def sniff(self, node: Node) -> list[Message]:
        """A list that fills with what peers send to this worker."""
        seen: list[Message] = []
        take = seen.append
        inbox = await self._buses[0].inbox(
            node.host.subject, Offer, Ready, Commit, Renew, Abandon, Run, Cancel
        )

        async def listen() -> None:
            async for delivery in inbox:
                take(delivery.message)

        self._sniffers.append(asyncio.create_task(listen()))
        return seen

    async def clean(self, *, timeout_s: float = 2.0) -> None:
        """Every worker that lives holds nothing any more, and its books are right."""
        alive = [node for node in self.nodes if not node._stopped]
        await until(
            lambda: not any(node.idle() for node in alive), timeout_s, lambda: [n.idle() for n in alive]
        )
        for node in alive:
            assert node.failure is None and not node._task.done(), node.failure
            node.engine.check()

    async def stop(self) -> None:
        for process in (*self.others, *self.nodes):
            await process.stop()
        for task in (self._listening, *self._sniffers):
            task.cancel()
        for bus in self._buses:
            await bus.close()


@contextlib.asynccontextmanager
async def running(server: BusSettings, folder: Path) -> AsyncIterator[Rig]:
    rig = Rig(server, folder)
    await rig.start()
    try:
        yield rig
        await rig.clean()
    finally:
        await rig.stop()


class Gate:
    """Holds a worker's pulls until it is opened."""

    def __init__(self, node: Node) -> None:
        self.reached, self._open = asyncio.Event(), asyncio.Event()
        puller: Any = node.worker._puller
        self._pull = puller.pull
        puller.pull = self._gated

    async def _gated(self, *args: Any) -> PullStats:
        self.reached.set()
        await self._open.wait()
        return await self._pull(*args)

    async def wait(self) -> None:
        """Until a pull is about to begin."""
        async with asyncio.timeout(5):
            await self.reached.wait()

    def open(self) -> None:
        self._open.set()
