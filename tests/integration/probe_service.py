"""A service for the tests of the host: `python probe_service.py ID`, settings from the environment.

It does what it is told over its control subject: `Drain`, or a `Cancel` whose `reason` names an order.
PROBE_DRAIN_S: how long a drain takes. PROBE_START: fail, refuse or hang. PROBE_WATCHDOG_S: a shorter one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import NoReturn

from prometheus_client import Counter

from baton.bus.inbox import Inbox
from baton.config.load import load
from baton.protocol.liveness import Load, Role, State
from baton.protocol.request import Accepted
from baton.protocol.work import Cancel, Drain
from baton.service import ServiceHost, StartupError, process, run_service


class ProbeService:
    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._orders = Counter("baton_probe_orders", "Orders taken", registry=host.registry)
        self._beats = 0

    async def start(self, group: asyncio.TaskGroup) -> None:
        match os.environ.get("PROBE_START"):
            case "fail":
                raise KeyError("no such thing")
            case "refuse":
                raise StartupError("port 1 is taken: set another")
            case "hang":
                print("starting", flush=True)
                await asyncio.Event().wait()
        inbox = await self._host.bus.inbox(self._host.subject, Drain, Cancel)
        group.create_task(self._serve(inbox))
        self._host.on_beat(self._count)
        self._host.beat.state = State.READY
        self._host.beat.routable = True
        await self._host.announce()

    async def drain(self, grace_s: float) -> None:
        self._host.beat.state = State.READY  # a mistake that the host must not pass on
        print("draining", flush=True)
        await asyncio.sleep(float(os.environ.get("PROBE_DRAIN_S", "0")))
        print("drained", flush=True)

    async def stop(self) -> None:
        print("stopped", flush=True)

    def _count(self) -> None:
        self._beats += 1
        self._host.beat.load = Load(running=self._beats)

    async def _serve(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            self._orders.inc()
            match delivery.message:
                case Drain(grace_ms=grace_ms):
                    await delivery.respond(Accepted())
                    self._host.request_drain(grace_ms)
                case Cancel(reason="fail"):
                    self._fail()
                case Cancel(reason="hang a thread"):
                    threading.Thread(target=threading.Event().wait).start()
                case Cancel():
                    await delivery.respond(Accepted())

    def _fail(self) -> NoReturn:
        raise KeyError("ordered to fail")


if __name__ == "__main__":
    process.WATCHDOG_S = float(os.environ.get("PROBE_WATCHDOG_S", process.WATCHDOG_S))
    sys.exit(run_service(Role.KVSTORE, load(None, os.environ, {}), ProbeService, instance=sys.argv[1]))
