"""What the host itself measures: the state of its inboxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.bus.connection import Bus
from baton.bus.inbox import Inbox


class BusFigures(Collector):
    """Malformed and dropped messages by the kind of subject (ctl, hb, tokens...), read when collected.

    An inbox counts for itself, on the hot path; its counts are added up here, and stay when it is closed.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[Inbox, tuple[int, int]] = {}
        self._malformed: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        self._add_up()
        malformed = CounterMetricFamily(
            "baton_malformed_messages", "Messages that could not be read", labels=["subject"]
        )
        dropped = CounterMetricFamily(
            "baton_dropped_messages", "Messages refused as an inbox was full", labels=["subject"]
        )
        for family, counts in ((malformed, self._malformed), (dropped, self._dropped)):
            for kind, count in counts.items():
                family.add_metric([kind], count)
        malformed.add_metric(["answer"], self._bus.malformed)
        return iter((malformed, dropped))

    def _add_up(self) -> None:
        inboxes = list(self._bus.inboxes)
        for inbox in {*inboxes, *self._seen}:
            malformed, dropped = self._seen.get(inbox, (0, 0))
            kind = _kind(inbox.subject)
            self._malformed[kind] += inbox.malformed - malformed
            self._dropped[kind] += inbox.dropped - dropped
            self._seen[inbox] = (inbox.malformed, inbox.dropped)
        for closed in self._seen.keys() - set(inboxes):
            del self._seen[closed]


def _kind(subject: str) -> str:
    """`baton.v1.<model>.<kind>...` -> kind; ids and epochs would make a series for each process."""
    parts = subject.split(".")
    return parts[3] if len(parts) > 3 else "other"
