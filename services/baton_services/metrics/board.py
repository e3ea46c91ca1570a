"""The newest figures of every process, and which of them still count. Pure: no bus, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from baton.protocol.liveness import Heartbeat
from baton.protocol.stats import Snapshot
from baton.telemetry.exposition import check

KEEP_S = 60.0  # how long counters of a process that has gone stay, so that a scraper sees their last value

Key = tuple[str, str]


@dataclass(slots=True)
class _Process:
    epoch: int = 0
    up: bool = False
    changed: float = 0.0  # when `up` changed, or its figures first came
    snapshot: Snapshot | None = None


class Board:
    """What is known of each process, by role and id; a newer epoch takes the place of an older one.

    Counters of one epoch only grow, as each snapshot is a whole registry. A new epoch starts from zero, which
    Prometheus takes for the counter reset that it is. When a process goes, its gauges go at once (nothing is
    running in it any more) and its counters after `KEEP_S`.
    """

    def __init__(self) -> None:
        self._processes: dict[Key, _Process] = {}

    def joined(self, beat: Heartbeat, now: float) -> None:
        """A heartbeat of a live process."""
        known = self._processes.setdefault((str(beat.role), beat.id), _Process(epoch=beat.epoch))
        if beat.epoch < known.epoch:
            return
        if beat.epoch > known.epoch:
            known.epoch, known.snapshot = beat.epoch, None
        if not known.up:
            known.up, known.changed = True, now

    def left(self, beat: Heartbeat, now: float) -> None:
        """That process stopped, or was not heard in time."""
        known = self._processes.get((str(beat.role), beat.id))
        if known is not None and known.up and beat.epoch >= known.epoch:
            known.up, known.changed = False, now

    def take(self, snapshot: Snapshot, now: float) -> None:
        """A process's figures.

        Raises:
            BadSnapshot: they would break the page.
        """
        check(snapshot)
        known = self._processes.setdefault(
            (snapshot.role, snapshot.id), _Process(epoch=snapshot.epoch, changed=now)
        )
        if snapshot.epoch < known.epoch:
            return
        if snapshot.epoch > known.epoch:  # its heartbeat will follow
            known.epoch, known.up, known.changed = snapshot.epoch, False, now
        known.snapshot = snapshot

    def forget(self, now: float) -> None:
        """Drops the processes that have been gone for `KEEP_S`."""
        gone = [
            key for key, known in self._processes.items() if not known.up and now - known.changed > KEEP_S
        ]
        for key in gone:
            del self._processes[key]

    def snapshots(self) -> list[Snapshot]:
        """What to show."""
        return [
            known.snapshot if known.up else _without_gauges(known.snapshot)
            for known in self._processes.values()
            if known.snapshot is not None
        ]

    def up(self) -> Iterator[Metric]:
        """`baton_up`: 1 for a process that is alive, 0 for one that has gone."""
        family = GaugeMetricFamily("baton_up", "Whether the process is alive", labels=["role", "instance"])
        for (role, instance), known in self._processes.items():
            family.add_metric([role, instance], float(known.up))
        yield family


def _without_gauges(snapshot: Snapshot) -> Snapshot:
    return Snapshot(
        role=snapshot.role,
        id=snapshot.id,
        epoch=snapshot.epoch,
        model=snapshot.model,
        families=[family for family in snapshot.families if family.kind != "gauge"],
    )
