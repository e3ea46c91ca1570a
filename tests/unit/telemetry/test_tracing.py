"""Tracing: nothing imported when off; when on, spans of two processes join over message headers."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.config.settings import TelemetrySettings
from baton.telemetry import tracing

OFF = """
import sys
from baton.config.settings import TelemetrySettings
from baton.telemetry.tracing import extract, inject, open_span, setup_tracing, shutdown_tracing, span
setup_tracing(TelemetrySettings(), "router", "router-1")
headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
with span("place", parent=extract(headers), tokens=3) as timed:
    timed.set(workers=2)
    assert inject() is None
open_span("place").end()
shutdown_tracing()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


class _Collector:
    """An OTLP/HTTP collector: keeps the spans it is sent."""

    def __init__(self) -> None:
        self.spans: dict[str, Span] = {}
        self.paths: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.add(self.path)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        outer.spans |= {span.name: span for span in scope.spans}
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[_Collector]:
    collector = _Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    tracing.shutdown_tracing()
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


def test_off_means_not_even_imported() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True, timeout=30)


def test_spans_join_over_headers(collector: _Collector) -> None:
    tracing.setup_tracing(TelemetrySettings(otlp_endpoint=collector.url, trace_ratio=1), "router", "router-1")
    with tracing.span("gateway", model="m"):
        headers = tracing.inject()
    assert headers is not None and set(headers) == {"traceparent"}
    with tracing.span("router", parent=tracing.extract(headers), tokens=3) as timed:
        timed.set(workers=2)
        later = tracing.open_span("later", parent=tracing.extract(tracing.inject()))
    later.end()
    assert tracing.inject() is None
    tracing.shutdown_tracing()

    assert collector.paths == {"/v1/traces"}
    spans = collector.spans
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["router"].parent_span_id == spans["gateway"].span_id
    assert spans["later"].parent_span_id == spans["router"].span_id
    assert {item.key: item.value.int_value for item in spans["router"].attributes} == {
        "tokens": 3,
        "workers": 2,
    }


def test_headers_that_are_no_trace_are_ignored(collector: _Collector) -> None:
    tracing.setup_tracing(TelemetrySettings(otlp_endpoint=collector.url, trace_ratio=1), "router", "router-1")
    assert tracing.extract(None) is None
    with tracing.span("alone", parent=tracing.extract({"traceparent": "nonsense"})):
        pass
    tracing.shutdown_tracing()
    assert collector.spans["alone"].parent_span_id == b""


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        tracing.setup_tracing(TelemetrySettings(otlp_endpoint=url, trace_ratio=1), "router", "router-1")
        with tracing.span("lost"):
            pass
        monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
        before = time.monotonic()
        tracing.shutdown_tracing()
        assert time.monotonic() - before < tracing.EXPORT_TIMEOUT_S * 0.9


def test_the_ratio_decides_at_the_root_and_children_follow(collector: _Collector) -> None:
    tracing.setup_tracing(TelemetrySettings(otlp_endpoint=collector.url, trace_ratio=0), "router", "router-1")
    with tracing.span("dropped"):
        unsampled = tracing.inject()
    sampled = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    for name, headers in (("dropped too", unsampled), ("kept", sampled)):
        with tracing.span(name, parent=tracing.extract(headers)):
            pass
    tracing.shutdown_tracing()
    assert set(collector.spans) == {"kept"}
