"""Metrics on their way to the metrics service, and back out as text."""

from __future__ import annotations

from baton.protocol.base import Message, Row


class Sample(Row):
    """One sample of a metric family: `suffix` as Prometheus has it ("", _total, _bucket, _sum, _count)."""

    suffix: str
    labels: dict[str, str]
    value: float


class Family(Row):
    """One metric family with its samples."""

    name: str
    kind: str  # counter, gauge, histogram
    help: str
    samples: list[Sample]


class Snapshot(Message):
    """Any service -> metrics: its whole registry, every few seconds. The newest of an epoch counts."""

    role: str
    id: str
    epoch: int
    model: str
    families: list[Family]


class MetricsQuery(Message):
    """Gateway or CLI -> metrics (a call): the cluster's metrics. Answered `MetricsText`."""


class MetricsText(Message):
    """Prometheus text exposition format 0.0.4."""

    text: str
