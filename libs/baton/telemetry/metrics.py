"""Every metric of the system, each name once.

A service builds the group it needs on its host's registry. The labels `instance`, `role` and `model` are
added when the cluster's metrics are written out (`baton.telemetry.exposition`). Times are in seconds, as
Prometheus wants them. (Two more are made where they are read: the inboxes' in `baton.service.figures`, and
`baton_up` in the metrics service.)
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.tally import Tally, TallyHistogram

# One set of buckets for everything a person waits for, so that histograms can be compared and added up:
# 1 ms (the mock) to 60 s, about 2.2 times apart.
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Steps of the token loop and hand-offs are shorter.
STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class LoadMetrics:
    """How much a service has in hand; kept by every service that holds requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge("baton_requests_running", "Requests being worked on", registry=registry)
        self.waiting = Gauge("baton_requests_waiting", "Requests queued", registry=registry)


class GatewayMetrics(LoadMetrics):
    """The gateway's HTTP side. `answers` is labelled `route` (the pattern, not the path) and `status`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.answers = Counter("baton_http_answers", "HTTP answers", ["route", "status"], registry=registry)
        self.disconnects = Counter(
            "baton_http_disconnects", "Clients gone before their answer was complete", registry=registry
        )


class RequestMetrics(LoadMetrics):
    """A request from end to end; kept by its owner, the tokenizer, so that each is counted once.

    `requests` is labelled `outcome`: `stop`, `length`, or a code of `baton.protocol.errors`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.time_to_first_token = Histogram(
            "baton_time_to_first_token_seconds",
            "Request taken to first token",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = TallyHistogram(
            "baton_inter_token_latency_seconds",
            "Between one token and the next of the same request",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "baton_request_duration_seconds",
            "Request taken to answer complete",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.requests = Counter("baton_requests", "Requests ended", ["outcome"], registry=registry)
        self.attempts = Counter("baton_attempts", "Attempts started, replays included", registry=registry)
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens of requests", registry=registry)
        self.output_tokens = Tally("baton_output_tokens", "Output tokens of requests", registry=registry)


class WorkerMetrics(LoadMetrics):
    """A prefill or decode worker: where a request's time goes, and its KV blocks.

    `handoff_bytes` and `handoff_blocks` are labelled `transport` (shm, tcp), and counted by the receiver;
    `handoffs` is labelled `outcome` (committed, refused, failed, expired), and counted by the sender.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.queue = Histogram(
            "baton_queue_seconds",
            "Sequence admitted to first scheduled",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.prefill = Histogram(
            "baton_prefill_seconds", "First scheduled to first token", buckets=WAIT_BUCKETS, registry=registry
        )
        self.handoff = Histogram(
            "baton_handoff_seconds",
            "First token known to sequence admitted at decode",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.decode = Histogram(
            "baton_decode_seconds",
            "Admitted at decode to last token",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.blocks_used = Gauge(
            "baton_kv_blocks_used", "KV blocks held by live sequences", registry=registry
        )
        self.blocks_total = Gauge("baton_kv_blocks_total", "KV blocks of the pool", registry=registry)
        self.prefix_hit_tokens = Counter(
            "baton_prefix_hit_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.computed_tokens = Counter(
            "baton_computed_tokens", "Tokens run through the model", registry=registry
        )
        self.handoff_bytes = Counter(
            "baton_handoff_bytes", "Bytes of KV pulled from peers", ["transport"], registry=registry
        )
        self.handoff_blocks = Counter(
            "baton_handoff_blocks", "KV blocks pulled from peers", ["transport"], registry=registry
        )
        self.handoffs = Counter("baton_handoffs", "Hand-offs ended", ["outcome"], registry=registry)


class RouterMetrics(LoadMetrics):
    """The router. `placements` is labelled `outcome`: placed, or the code of the refusal."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.placements = Counter("baton_placements", "Placements answered", ["outcome"], registry=registry)
        self.place = Histogram(
            "baton_placement_seconds",
            "Placement asked to answered, the router's queue included",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.indexed_blocks = Gauge(
            "baton_indexed_blocks", "Block entries of the prefix index", registry=registry
        )


class KvStoreMetrics:
    """The KV store. All but `misses` are labelled `tier`: ram, redis."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tier = ["tier"]
        self.blocks = Gauge("baton_kvstore_blocks", "Blocks held", tier, registry=registry)
        self.bytes = Gauge("baton_kvstore_bytes", "Bytes held", tier, registry=registry)
        self.hits = Counter("baton_kvstore_hits", "Blocks looked up and found", tier, registry=registry)
        self.misses = Counter("baton_kvstore_misses", "Blocks looked up, in no tier", registry=registry)
        self.stored = Counter("baton_kvstore_stored", "Blocks taken in", tier, registry=registry)
        self.dropped = Counter(
            "baton_kvstore_dropped", "Blocks offered that were not taken in", tier, registry=registry
        )
        self.evicted = Counter("baton_kvstore_evicted", "Blocks given up for room", tier, registry=registry)
        self.errors = Counter(
            "baton_kvstore_errors", "Operations that failed and counted as misses", tier, registry=registry
        )


class BatchMetrics(LoadMetrics):
    """A batch service. `results` is labelled `outcome`: completed, failed, repeated (there was one already),
    dropped (the job had ended), returned (its job was not found, it is looked at again)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.results = Counter(
            "baton_batch_results", "Requests of jobs ended", ["outcome"], registry=registry
        )
        self.jobs = Gauge("baton_batch_jobs", "Jobs that this service sees to", registry=registry)
