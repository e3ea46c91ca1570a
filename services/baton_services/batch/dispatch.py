"""Taking requests from the queue, and running as many as there is room for."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
from nats.aio.msg import Msg

from baton.batch import names, results
from baton.batch.order import prefix_key
from baton.batch.results import Item
from baton.bus.stored import AWAY, StoreError, Work, delivered, patiently, sequence
from baton.protocol.liveness import Role
from baton.service.base import ServiceHost
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import BatchMetrics
from baton_services.batch.outlet import Outlet
from baton_services.batch.pace import Pace, room
from baton_services.batch.requests import JobOver, Runner
from baton_services.batch.window import Entry, Window

log = get_logger(__name__)

ACK_WAIT_S = 5.0  # a service that is killed holds its requests up for so long
PROGRESS_S = 1.5
WINDOW = 512  # requests of a priority taken and not begun
STORING = 256  # results on their way to the store
WINDOW_BYTES = 64 * 2**20
PULL = 128
WAIT_S = 5.0
ROUND_S = 0.25
RETURN_S = 2.0  # until a request whose job is not found is handed out again
MAX_DELIVERIES = 200  # a request that ends its service each time is not tried for ever
MAX_PENDING = 20_000

_item = msgspec.msgpack.Decoder(Item)


class _Model(msgspec.Struct):
    model: str


class Dispatcher:
    """Holds a window of requests, begins them in prefix order, and acknowledges each with its result."""

    def __init__(self, host: ServiceHost, runner: Runner, outlet: Outlet, metrics: BatchMetrics) -> None:
        self._host = host
        self._runner = runner
        self._outlet = outlet
        self._metrics = metrics
        self._queues = [Work(host.bus, names.ITEM_STREAM, priority) for priority in names.PRIORITIES]
        self._taken = [asyncio.Event() for _ in self._queues]  # something taken from it has been begun
        self._waiting = [0] * len(self._queues)
        self._windows: dict[str, Window] = {}
        self._paces: dict[str, Pace] = {}
        self._running: dict[str, int] = {}
        self._held: dict[int, Entry] = {}  # taken and not acknowledged
        self._held_bytes = 0
        self._changed = asyncio.Event()
        self._draining = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Opens the queues, which must exist."""
        for queue in self._queues:
            await queue.open()
        self._group = group
        for rank in range(len(names.PRIORITIES)):
            group.create_task(self._take(rank))
        group.create_task(self._begin())
        group.create_task(self._hold())

    async def drain(self) -> None:
        """Begins nothing more; what waits goes back for others to take."""
        self._draining = True
        for window in self._windows.values():
            while len(window):
                entry = window.pop()
                with contextlib.suppress(*AWAY):
                    await self._queues[entry.priority].again(entry.msg, 0.0)
                self._begun(entry)
                self._drop(entry)

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def busy(self) -> int:
        """Requests that are begun and not acknowledged."""
        return len(self._held) - sum(self._waiting)

    # --- taking ------------------------------------------------------------------------------------------

    async def _take(self, rank: int) -> None:
        """Keeps as many of one priority in hand as can be put in a good order."""
        queue, begun = self._queues[rank], self._taken[rank]
        while not self._draining:
            begun.clear()
            room = WINDOW - self._waiting[rank]
            if room < WINDOW // 8 or self._held_bytes >= WINDOW_BYTES:
                await begun.wait()
                continue
            try:
                found = await queue.pull(min(room, PULL)) or await queue.pull(1, wait_s=WAIT_S)
            except AWAY:
                await self._host.bus.up.wait()
                await asyncio.sleep(ROUND_S)
                continue
            except StoreError as error:
                log.warning("the queue does not answer: %s", error)
                await asyncio.sleep(WAIT_S)
                continue
            for msg in found:
                self._add(msg, rank)
            self._changed.set()

    def _add(self, msg: Msg, rank: int) -> None:
        seq = sequence(msg)
        held = self._held.get(seq)
        if held is not None:  # handed out again while we were at it: the newest delivery counts
            held.msg = msg
            return
        item = _item.decode(msg.data)
        body = msgspec.json.decode(item.body)
        again = delivered(msg) > 1
        key = prefix_key(item.endpoint, body) if self._host.settings.batch.order == "prefix" else ()
        entry = Entry(key, seq, item, str(body.get("model")), msg, rank, again)
        self._held[seq] = entry
        self._held_bytes += len(msg.data)
        self._waiting[rank] += 1
        self._windows.setdefault(entry.model, Window()).add(entry)

    # --- beginning ---------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        while True:
            now = time.monotonic()
            for model, window in list(self._windows.items()):
                pace = self._paces.setdefault(model, Pace())
                limit = pace.limit(self._room(model), now)
                while len(window) and self._running.get(model, 0) < limit and self._may_begin():
                    self._start(window.pop(), pace)
                if not len(window) and not self._running.get(model):
                    del self._windows[model]
            self._metrics.running.set(self.running)
            self._metrics.waiting.set(sum(self._waiting))
            self._changed.clear()
            with contextlib.suppress(TimeoutError):  # room that others leave is looked for
                async with asyncio.timeout(ROUND_S if self._windows else None):
                    await self._changed.wait()

    def _may_begin(self) -> bool:
        """Not while we drain, nor while the store takes results more slowly than they are made."""
        return not self._draining and self.busy - self.running < STORING

    def _room(self, model: str) -> int:
        """This service's share of the workers' room."""
        directory = self._host.directory
        real = next(
            (
                beat.model_info.name
                for beat in directory.live(Role.TOKENIZER)
                if beat.model_info and model in (beat.model_info.name, *beat.model_info.aliases)
            ),
            model,
        )
        services = max(1, len(directory.live(Role.BATCH)))
        workers = [beat for beat in directory.live(Role.DECODE) if beat.model == real]
        workers = workers or [beat for beat in directory.live(Role.PREFILL) if beat.model == real]
        most = room(workers, self._running.get(model, 0) * services)
        most = min(most, self._host.settings.batch.max_in_flight or most)
        return max(1, most // services)

    def _start(self, entry: Entry, pace: Pace) -> None:
        self._running[entry.model] = self._running.get(entry.model, 0) + 1
        entry.runs = True
        self._begun(entry)
        self._group.create_task(self._run(entry, pace))

    def _begun(self, entry: Entry) -> None:
        """It has left the window."""
        self._waiting[entry.priority] -= 1
        self._taken[entry.priority].set()

    async def _run(self, entry: Entry, pace: Pace) -> None:
        try:
            try:
                outcome = await self._result(entry, pace)
            except StoreError as error:  # a full disk, say
                log.error("request %s of job %s: %s", entry.item.token, entry.item.job, error)
                outcome = "returned"
            except Exception:  # one request that we cannot deal with does not stop the others
                log.exception("request %s of job %s", entry.item.token, entry.item.job)
                outcome = "returned"
            self._metrics.results.labels(outcome).inc()
            queue = self._queues[entry.priority]
            if outcome == "returned":
                await patiently(lambda: queue.again(entry.msg, RETURN_S))
            else:  # double: it leaves our hands once the server knows that it is done
                await patiently(lambda: queue.done(entry.msg))
            self._drop(entry)
        finally:
            self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        """Its place among those that run is free; its result may still be on the way to the store."""
        if entry.runs:
            entry.runs = False
            self._running[entry.model] -= 1
            self._changed.set()

    def _drop(self, entry: Entry) -> None:
        del self._held[entry.seq]
        self._held_bytes -= len(entry.msg.data)
        self._changed.set()
        for begun in self._taken:
            begun.set()

    async def _result(self, entry: Entry, pace: Pace) -> str:
        """Sees to it that there is a result, if one is wanted. What came of it, in a word."""
        item = entry.item
        known = await self._runner.known(item)
        if known is None:
            return "returned"
        if not known:
            return "dropped"
        if entry.redelivered and await self._outlet.settled(item):
            return "repeated"
        if delivered(entry.msg) > MAX_DELIVERIES:
            words = f"given up: begun {MAX_DELIVERIES} times, and no service came to an end with it"
            result = results.failed(item, "dead_letter", words)
        else:
            try:
                result = await self._runner.run(item, names.PRIORITIES[entry.priority], pace)
            except JobOver:
                return "dropped"
            self._leave(entry)
            pace.succeeded(self._room(entry.model))
        if not await self._outlet.store(item, result):
            return "repeated"
        return "failed" if result.failed else "completed"

    async def _hold(self) -> None:
        """Tells the server that all we hold is being worked on."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            try:
                for entry in list(self._held.values()):
                    await self._queues[entry.priority].going_on(entry.msg)
            except AWAY:
                continue
