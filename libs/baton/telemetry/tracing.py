"""Spans of a request's way, sent by OTLP/HTTP, and carried across the bus as W3C `traceparent` headers.

With no endpoint set nothing of OpenTelemetry is imported, and each function here costs one comparison.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from baton.config.settings import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

EXPORT_TIMEOUT_S = 2.0  # of one batch
FLUSH_S = 3.0  # of all batches at the end


class Span(Protocol):
    """A piece of work being timed."""

    def set(self, **attributes: str | int | float | bool) -> None:
        """Adds attributes."""

    def end(self) -> None:
        """Stops the clock and hands the span to the exporter."""


class _NoSpan:
    def set(self, **attributes: str | int | float | bool) -> None:
        return None

    def end(self) -> None:
        return None


class _RealSpan:
    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    def set(self, **attributes: str | int | float | bool) -> None:
        self._span.set_attributes(attributes)

    def end(self) -> None:
        self._span.end()


_NO_SPAN = _NoSpan()
_NO_CONTEXT = contextlib.nullcontext(_NO_SPAN)

_provider: TracerProvider | None = None
_tracer: Tracer | None = None


def setup_tracing(settings: TelemetrySettings, role: str, instance: str) -> None:
    """Starts tracing where `telemetry.otlp_endpoint` is set: `http://collector:4318`, or the full URL."""
    global _provider, _tracer
    if not settings.otlp_endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    endpoint = settings.otlp_endpoint.rstrip("/")
    if not endpoint.endswith("/v1/traces"):
        endpoint += "/v1/traces"
    _provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
        resource=Resource.create({"service.name": f"baton-{role}", "service.instance.id": instance}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    _provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = _provider.get_tracer("baton")


def shutdown_tracing() -> None:
    """Sends what is left, for at most `FLUSH_S`. Blocks."""
    global _provider, _tracer
    if _provider is not None:
        # In a thread, as a collector that hangs would hold us up for every batch that waits.
        flushing = threading.Thread(target=_provider.shutdown, name="trace-flush", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
    _provider = _tracer = None


def span(
    name: str, *, parent: Context | None = None, **attributes: str | int | float | bool
) -> AbstractContextManager[Span]:
    """Times the body of a `with`, as a child of `parent` or else of the span around it."""
    if _tracer is None:
        return _NO_CONTEXT
    return _recording(_tracer, name, parent, attributes)


@contextlib.contextmanager
def _recording(tracer: Tracer, name: str, parent: Context | None, attributes: dict[str, Any]) -> Any:
    with tracer.start_as_current_span(name, context=parent, attributes=attributes) as recorded:
        yield _RealSpan(recorded)


def open_span(name: str, *, parent: Context | None = None, **attributes: str | int | float | bool) -> Span:
    """A span that lives across callbacks: the caller ends it."""
    if _tracer is None:
        return _NO_SPAN
    return _RealSpan(_tracer.start_span(name, context=parent, attributes=attributes))


def inject() -> dict[str, str] | None:
    """The current span as message headers, or None when off or outside any span."""
    if _tracer is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers or None


def extract(headers: Mapping[str, str] | None) -> Context | None:
    """The sender's span from message headers, as a `parent` for ours; None when off or there is none."""
    if _tracer is None or not headers:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
