"""Registry -> snapshot -> Prometheus page, read back with Prometheus's own parser."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from baton.protocol.codec import Codec, encode
from baton.protocol.stats import Family, Sample, Snapshot
from baton.telemetry import metrics
from baton.telemetry.exposition import BadSnapshot, check, render, snapshot

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _snapshot(registry: CollectorRegistry, *, id: str, role: str = "decode", model: str = "m") -> Snapshot:
    sent = Snapshot(role=role, id=id, epoch=1, model=model, families=snapshot(registry))
    return Codec(Snapshot).decode(encode(sent))


def _series(text: str) -> Series:
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series, f"{key} twice"
            series[key] = sample.value
    return series


def _worker(id: str, seconds: float) -> Snapshot:
    registry = CollectorRegistry()
    figures = metrics.WorkerMetrics(registry)
    figures.prefill.observe(seconds)
    figures.running.set(3)
    figures.handoff_bytes.labels("shm").inc(4096)
    return _snapshot(registry, id=id)


def test_two_instances_make_one_family() -> None:
    text = render([_worker("decode-1", 0.02), _worker("decode-2", 7)])
    assert text.count("# TYPE baton_prefill_seconds histogram") == 1
    series = _series(text)
    for id, below in (("decode-1", 1.0), ("decode-2", 0.0)):
        origin = {("instance", id), ("role", "decode"), ("model", "m")}
        assert series["baton_requests_running", frozenset(origin)] == 3
        assert series["baton_prefill_seconds_count", frozenset(origin)] == 1
        assert series["baton_prefill_seconds_bucket", frozenset(origin | {("le", "0.025")})] == below
        assert series["baton_prefill_seconds_bucket", frozenset(origin | {("le", "+Inf")})] == 1
        assert series["baton_handoff_bytes_total", frozenset(origin | {("transport", "shm")})] == 4096


def test_a_service_of_no_model_has_no_model_label() -> None:
    registry = CollectorRegistry()
    metrics.GatewayMetrics(registry).running.set(1)
    series = _series(render([_snapshot(registry, id="gateway-1", role="gateway", model="")]))
    key = "baton_requests_running", frozenset({("instance", "gateway-1"), ("role", "gateway")})
    assert series[key] == 1


@pytest.mark.parametrize("value", ['say "hi"', "back\\slash", "two\nlines", "ünï", "}{=,", ""])
def test_label_values_are_escaped(value: str) -> None:
    registry = CollectorRegistry()
    Counter("baton_test", 'help with "quotes" and\nnewline', ["what"], registry=registry).labels(value).inc()
    text = render([_snapshot(registry, id="a")])
    name, labels = next(key for key in _series(text) if key[0] == "baton_test_total")
    assert dict(labels)["what"] == value and name == "baton_test_total"


def test_families_of_different_kinds_under_one_name_do_not_break_the_page() -> None:
    one = Snapshot(
        role="a", id="1", epoch=1, model="", families=[Family("x", "gauge", "", [Sample("", {}, 1.0)])]
    )
    two = Snapshot(
        role="a",
        id="2",
        epoch=1,
        model="",
        families=[Family("x", "counter", "", [Sample("_total", {}, 2.0)])],
    )
    assert list(_series(render([one, two])).values()) == [1.0]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (Family("bad name", "gauge", "", []), "no metric name"),
        (Family("x\n# HELP y", "gauge", "", []), "no metric name"),
        (Family("x", "info", "", []), "unknown kind"),
        (Family("x", "gauge", "", [Sample("_total", {}, 1.0)]), "has no '_total'"),
        (Family("x", "gauge", "", [Sample("", {'a="b"': "c"}, 1.0)]), "label that is not allowed"),
        (Family("x", "gauge", "", [Sample("", {"instance": "other"}, 1.0)]), "label that is not allowed"),
        (Family("x", "gauge", "", [Sample("", {}, 1.0)] * 20_001), "more than 20000"),
    ],
)
def test_a_snapshot_that_would_break_the_page_is_refused(family: Family, said: str) -> None:
    with pytest.raises(BadSnapshot, match=said):
        check(Snapshot(role="a", id="1", epoch=1, model="", families=[family]))


def test_every_group_of_metrics_passes_the_check() -> None:
    for group in (
        metrics.RequestMetrics,
        metrics.GatewayMetrics,
        metrics.WorkerMetrics,
        metrics.RouterMetrics,
        metrics.KvStoreMetrics,
    ):
        registry = CollectorRegistry()
        group(registry)
        check(_snapshot(registry, id="a"))
        assert all(family.name.startswith("baton_") and family.help for family in snapshot(registry))
