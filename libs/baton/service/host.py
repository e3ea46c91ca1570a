"""`run_service`: one process from its start to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Iterator

from baton.bus.connection import Bus, BusDown, BusRefused
from baton.config.settings import Settings
from baton.protocol.liveness import Role, State
from baton.protocol.subjects import check_instance
from baton.service import heart, process
from baton.service.base import Service, ServiceHost, StartupError, default_instance
from baton.service.figures import BusFigures
from baton.telemetry.logs import setup_logging
from baton.telemetry.tracing import setup_tracing, shutdown_tracing

__all__ = ["Service", "ServiceHost", "StartupError", "run_service"]

_log = logging.getLogger(__name__)

BUS_WAIT_S = 30.0
STOP_S = 5.0  # for `Service.stop`
OVERRUN_S = 1.0  # a drain may take this much longer than its grace before it is cut off
GC_ALLOCATIONS = 20_000  # between two looks at young objects; Python looks after 700

Factory = Callable[[ServiceHost], Service]


class _Finished(Exception):
    """Raised in the task group's body to end its tasks."""


def run_service(
    role: Role, settings: Settings, factory: Factory, *, instance: str = "", model: str = ""
) -> int:
    """Runs one service until it is told to end; blocks. Returns the exit code; the process should then exit.

    0 after a drain (SIGTERM, SIGINT or `ServiceHost.request_drain`), 1 after a failure, 3 when its supervisor
    died. A second signal cuts the drain short: 1. A process that does not end in time ends itself with 4.
    """
    setup_logging(settings.telemetry, role, instance)
    try:
        instance = check_instance(instance or default_instance(role))
    except ValueError as error:
        _log.critical("%s", error)
        return process.EXIT_FAILED
    setup_logging(settings.telemetry, role, instance)
    setup_tracing(settings.telemetry, role, instance)
    # What was imported is never garbage, and a message's objects die by their counts: look less often.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 10, 10)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_connect_and_serve(role, settings, factory, instance, model))
    finally:
        shutdown_tracing()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows, or an interpreter it is not built for
        return None
    return uvloop.new_event_loop


async def _connect_and_serve(
    role: Role, settings: Settings, factory: Factory, instance: str, model: str
) -> int:
    signals = process.Signals()
    parent = process.Parent(os.environ)
    connecting = Bus.connect(settings.bus, name=instance, wait_s=BUS_WAIT_S)
    try:
        connected = await process.unless(signals.first, connecting, parent.check)
    except process.ParentGone as error:
        _log.critical("%s", error)
        return process.EXIT_ORPHANED
    if connected is None:
        return process.EXIT_OK
    try:
        bus = connected.result()
    except (BusDown, BusRefused) as error:
        _log.critical("%s", error)
        return process.EXIT_FAILED
    host = ServiceHost(role, settings, bus, id=instance, model=model)
    host.registry.register(BusFigures(bus))
    signals.on_first(lambda: host.request_drain(settings.worker.grace_ms))
    try:
        return await _serve(host, factory, signals, parent)
    finally:
        await bus.close()


async def _serve(
    host: ServiceHost, factory: Factory, signals: process.Signals, parent: process.Parent
) -> int:
    service: Service | None = None
    code = process.EXIT_OK
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(heart.beat(host, parent.check))
            group.create_task(heart.answer_asks(host))
            group.create_task(heart.send_snapshots(host))
            group.create_task(host.directory.run())
            service = factory(host)
            started = await process.unless(host.stopping, service.start(group))
            if started is not None:
                started.result()
                await host.stopping.wait()
                if not await _drain(host, service, signals):
                    code = process.EXIT_FAILED
            raise _Finished
    except BaseExceptionGroup as failures:
        code = _report(host, failures) or code
    stopped = await _stop(host, service)
    return code if stopped else code or process.EXIT_FAILED


async def _drain(host: ServiceHost, service: Service, signals: process.Signals) -> bool:
    """Lets the service end what it has. False when a second signal cut that short."""
    process.arm_watchdog(host.grace_s + process.WATCHDOG_S)
    host.enter(State.DRAINING)
    await host.announce()
    try:
        async with asyncio.timeout(host.grace_s + OVERRUN_S):
            drained = await process.unless(signals.second, service.drain(host.grace_s))
    except TimeoutError:
        _log.warning("not drained after %g s: ending all the same", host.grace_s)
        return True
    if drained is None:
        return False
    drained.result()
    return True


async def _stop(host: ServiceHost, service: Service | None) -> bool:
    """Says goodbye and stops the service. False when that failed."""
    process.arm_watchdog(process.WATCHDOG_S)
    await host.publish_snapshot()
    host.enter(State.STOPPED)
    await host.announce()
    if service is None:
        return True
    try:
        async with asyncio.timeout(STOP_S):
            await service.stop()
    except TimeoutError:
        _log.error("did not stop within %g s", STOP_S)
        return False
    except Exception:
        _log.exception("failed while stopping")
        return False
    return True


def _report(host: ServiceHost, failures: BaseExceptionGroup) -> int:
    """Logs why the task group ended, the first cause with its traceback. Returns the exit code."""
    code = process.EXIT_OK
    for failure in _leaves(failures):
        match failure:
            case _Finished():
                continue
            case process.ParentGone():
                _log.critical("%s", failure)
                return process.EXIT_ORPHANED
            case StartupError():
                _log.critical("%s", failure)
            case _ if code:
                _log.error("and %s: %s", type(failure).__name__, failure)
            case _:
                _log.critical("failed: %s", failure, exc_info=failure)
        host.beat.note = host.beat.note if code else f"{type(failure).__name__}: {failure}"[:500]
        code = process.EXIT_FAILED
    return code


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for failure in group.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
