"""Metrics on their way: a registry to a snapshot, and the snapshots of a cluster to Prometheus text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from baton.protocol.stats import Family, Sample, Snapshot

MAX_SAMPLES = 20_000  # of one snapshot

_SUFFIXES = {
    "counter": {"_total"},
    "gauge": {""},
    "histogram": {"_bucket", "_sum", "_count"},
}
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = {"instance", "role", "model"}


class BadSnapshot(ValueError):
    """A snapshot that is no set of Prometheus families; the message says why."""


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """All families of a registry that have samples."""
    families = []
    for metric in registry.collect():
        start = len(metric.name)
        suffixes = _SUFFIXES[metric.type]
        samples = [
            Sample(sample.name[start:], sample.labels, float(sample.value))
            for sample in metric.samples
            if sample.name[start:] in suffixes  # not `_created`, which the text format does not know
        ]
        if samples:
            families.append(Family(metric.name, metric.type, metric.documentation, samples))
    return families


def check(received: Snapshot) -> None:
    """Refuses what would break the cluster's page, as another process sent it.

    Raises:
        BadSnapshot: a name, kind, suffix or label that Prometheus does not take, or too many samples.
    """
    if sum(len(family.samples) for family in received.families) > MAX_SAMPLES:
        raise BadSnapshot(f"more than {MAX_SAMPLES} samples")
    for family in received.families:
        if not _NAME.fullmatch(family.name):
            raise BadSnapshot(f"{family.name!r:.80} is no metric name")
        if family.kind not in _SUFFIXES:
            raise BadSnapshot(f"{family.name} has the unknown kind {family.kind!r:.40}")
        for sample in family.samples:
            if sample.suffix not in _SUFFIXES[family.kind]:
                raise BadSnapshot(f"a {family.kind} ({family.name}) has no {sample.suffix!r:.40}")
            if not all(_NAME.fullmatch(label) and label not in _OURS for label in sample.labels):
                raise BadSnapshot(f"{family.name} has a label that is not allowed")


def render(snapshots: Iterable[Snapshot], *, more: Iterable[Metric] = ()) -> str:
    """One Prometheus page (text format 0.0.4) of many processes' snapshots.

    Families of one name become one, whose samples carry the labels `role`, `instance` and, where a service
    belongs to one model, `model`. Where two processes disagree on a family's kind, the first one counts.
    """
    registry = CollectorRegistry()
    registry.register(_Cluster(lambda: [*_merged(snapshots), *more]))
    return generate_latest(registry).decode()


class _Cluster(Collector):
    def __init__(self, metrics: Callable[[], list[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics()

    def describe(self) -> list[Metric]:
        return []


def _merged(snapshots: Iterable[Snapshot]) -> list[Metric]:
    merged: dict[str, Metric] = {}
    for one in snapshots:
        origin = {"role": str(one.role), "instance": one.id} | ({"model": one.model} if one.model else {})
        for family in one.families:
            metric = merged.setdefault(family.name, Metric(family.name, family.help, family.kind))
            if metric.type != family.kind:
                continue
            for sample in family.samples:
                metric.add_sample(family.name + sample.suffix, sample.labels | origin, sample.value)
    return [merged[name] for name in sorted(merged)]
