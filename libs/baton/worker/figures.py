"""What a worker can measure: its part of a request's time, its blocks, its hand-offs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.kvcache.pull import PullStats
from baton.protocol.liveness import Load
from baton.protocol.request import Timing
from baton.telemetry.metrics import WorkerMetrics


class WorkerFigures:
    """Feeds the worker metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = WorkerMetrics(registry)

    def load(self, load: Load) -> None:
        self._metrics.running.set(load.running)
        self._metrics.waiting.set(load.waiting)
        self._metrics.blocks_used.set(load.blocks_used)
        self._metrics.blocks_total.set(load.blocks_total)

    def computed(self, tokens: int) -> None:
        self._metrics.computed_tokens.inc(tokens)

    def first_token(self, queue_ms: float, prefill_ms: float, cached_tokens: int) -> None:
        self._metrics.queue.observe(queue_ms / 1000)
        self._metrics.prefill.observe(prefill_ms / 1000)
        self._metrics.prefix_hit_tokens.inc(cached_tokens)

    def decoded(self, decode_ms: float) -> None:
        self._metrics.decode.observe(decode_ms / 1000)

    def pulled(self, stats: PullStats, blocks: int) -> None:
        self._metrics.handoff_bytes.labels(stats.transport).inc(stats.bytes)
        self._metrics.handoff_blocks.labels(stats.transport).inc(blocks)

    def admitted(self, timing: Timing) -> None:
        self._metrics.handoff.observe(timing.handoff_ms / 1000)

    def handoff(self, outcome: str) -> None:
        """`outcome`, at the sender: committed, refused, failed, expired."""
        self._metrics.handoffs.labels(outcome).inc()
