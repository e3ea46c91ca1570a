"""The quick metrics read exactly as prometheus_client's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from baton.telemetry.exposition import snapshot
from baton.telemetry.metrics import STEP_BUCKETS
from baton.telemetry.tally import Tally, TallyHistogram

observations = st.tuples(st.sampled_from([*STEP_BUCKETS, 0.0, 0.003, 7.0]), st.integers(1, 5))


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(observations, max_size=20))
def test_same_text_and_same_families_as_the_real_ones(seen: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = TallyHistogram("baton_x_seconds", "X", buckets=STEP_BUCKETS, registry=ours)
    counter = Tally("baton_y", "Y", registry=ours)
    real_histogram = Histogram("baton_x_seconds", "X", buckets=STEP_BUCKETS, registry=theirs)
    real_counter = Counter("baton_y", "Y", registry=theirs)
    for value, times in seen:
        histogram.observe(value, times)
        counter.inc(times)
        for _ in range(times):
            real_histogram.observe(value)
            real_counter.inc()

    def rounded(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
        return {
            (family.name, sample.suffix, sample.labels.get("le", "")): round(sample.value, 9)
            for family in snapshot(registry)
            for sample in family.samples
        }

    assert rounded(ours) == rounded(theirs)
    kinds = [line for line in lines(ours) if line.startswith("#")]
    assert kinds == [line for line in lines(theirs) if line.startswith("#")]
