"""What the owner of requests can measure: time to first token, between tokens, and in all."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import RequestMetrics
from baton_services.tokenizer.live import LiveRequest


class Figures:
    """Feeds the request metrics of one tokenizer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = RequestMetrics(registry)

    def live(self, running: int, waiting: int) -> None:
        self._metrics.running.set(running)
        self._metrics.waiting.set(waiting)

    def began(self, live: LiveRequest) -> None:
        self._metrics.prompt_tokens.inc(len(live.prompt))

    def attempt(self) -> None:
        self._metrics.attempts.inc()

    def tokens(self, live: LiveRequest, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        if not live.first_token:
            live.first_token = now
            self._metrics.time_to_first_token.observe(now - live.arrived)
        else:
            self._metrics.inter_token_latency.observe((now - live.last_token) / count, count)
        live.last_token = now
        self._metrics.output_tokens.inc(count)

    def ended(self, live: LiveRequest, outcome: str) -> None:
        self._metrics.requests.labels(outcome).inc()
        self._metrics.duration.observe(time.monotonic() - live.arrived)
