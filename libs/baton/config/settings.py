"""The settings tree. Each option is here once, with its one default and what it means.

Set it by a TOML file (`[section]` and `option = value`), by the environment (`BATON_SECTION_OPTION`) or by
a flag of the command line (`--section-option`; the common ones have short names). Flags win over the
environment, the environment over the file. An unknown option or a value of the wrong kind is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton.config.secrets import SECRET, is_secret, redact

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One section of the tree. Printed, it shows no secret."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [
            (field.name, redact(getattr(self, field.name), secret=is_secret(field.type)))
            for field in msgspec.structs.fields(type(self))
        ]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"


class BusSettings(Section):
    url: Annotated[str, Meta(description="NATS server; tls://HOST:4222 with TLS")] = "nats://127.0.0.1:4222"
    user: Annotated[str, Meta(description="NATS user")] = ""
    password: Annotated[str, Meta(description="NATS password; never logged", extra=SECRET)] = ""
    store_dir: Annotated[
        str,
        Meta(
            description="where `baton up`'s own server keeps batch jobs, files and stored responses; "
            "empty: in the run's folder, gone with it"
        ),
    ] = ""
    tls_ca: Annotated[
        str, Meta(description="CA file that the server's certificate is checked against; empty: the system's")
    ] = ""
    tls_cert: Annotated[str, Meta(description="certificate shown to the server; empty: none")] = ""
    tls_key: Annotated[str, Meta(description="its key file")] = ""


class ModelSettings(Section):
    name: Annotated[
        str, Meta(description="catalogue name, hub ORG/NAME, or a path; `mock` with the mock engine")
    ] = "smollm2-135m-instruct"
    cache_dir: Annotated[str, Meta(description="where pulled models lie; empty: ~/.cache/baton")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int8", "int4", "fp8"],
        Meta(
            description="weights; auto: as the file has them, or 8 bit in groups (native); "
            "float16, or float32 where that is slow (torch); bfloat16 (triton; the last four are its own)"
        ),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"],
        Meta(
            description="KV cache; auto: float32 with float32 weights, else float16; "
            "the type computed in, int8 or fp8 (triton)"
        ),
    ] = "auto"
    aliases: Annotated[list[str], Meta(description="other names that clients may call it by")] = (
        msgspec.field(default_factory=list)
    )
    max_context: Annotated[Count, Meta(description="tokens of prompt and answer; 0: the model's own")] = 0
    block_size: Annotated[Literal[8, 16, 32, 64], Meta(description="tokens a KV block")] = 16


class WorkerSettings(Section):
    engine: Annotated[
        Literal["auto", "triton", "native", "torch", "mock"],
        Meta(
            description="triton: an NVIDIA GPU; native: C++ kernels for CPUs; torch; mock: no model, only "
            "its cost model; auto: triton with a GPU, else native where it can be, else torch"
        ),
    ] = "auto"
    threads: Annotated[
        Count, Meta(description="compute threads; 0: the machine's cores shared among its workers")
    ] = 0
    kv_memory_mb: Annotated[Positive, Meta(description="KV pool of each worker, MB")] = 512
    max_batch_tokens: Annotated[Positive, Meta(description="token budget a step")] = 256
    max_sequences: Annotated[Positive, Meta(description="sequences in one step")] = 64
    max_waiting: Annotated[Positive, Meta(description="sequences queued in a worker before it refuses")] = 256
    prefix_cache: Annotated[bool, Meta(description="reuse KV blocks of equal prefixes")] = True
    transports: Annotated[
        list[Literal["shm", "tcp"]], Meta(min_length=1, description="hand-off, best first")
    ] = msgspec.field(default_factory=lambda: ["shm", "tcp"])
    shm_dir: Annotated[str, Meta(description="where KV pools lie; one tmpfs shared by a host's workers")] = (
        "/dev/shm"
    )
    tcp_host: Annotated[
        str,
        Meta(
            description="address that the TCP transport binds and announces; "
            "auto: the one from which the NATS server is reached"
        ),
    ] = "127.0.0.1"
    tcp_port: Annotated[Port, Meta(description="its port; 0: any free one")] = 0
    tcp_announce: Annotated[
        str,
        Meta(description="HOST:PORT at which peers reach it, where that is another one; empty: as bound"),
    ] = ""
    tls_ca: Annotated[
        str,
        Meta(description="CA file; set in workers and KV stores, TCP transfers are encrypted on both sides"),
    ] = ""
    tls_cert: Annotated[str, Meta(description="certificate shown to peers, signed by that CA")] = ""
    tls_key: Annotated[str, Meta(description="its key file")] = ""
    lease_ms: Annotated[
        Positive, Meta(description="how long offered blocks stay pinned without a sign of life, ms")
    ] = 30_000
    grace_ms: Annotated[Positive, Meta(description="longest drain, ms")] = 30_000
    step_timeout_ms: Annotated[
        Positive, Meta(description="a model step that takes longer means that the engine hangs, ms")
    ] = 30_000


class MockSettings(Section):
    """The mock engine's cost model: a step lasts `step_us` + `token_us` for each token it computes."""

    step_us: Annotated[Count, Meta(description="fixed cost of a step, us")] = 1_000
    token_us: Annotated[Count, Meta(description="cost of each token computed in a step, us")] = 20
    block_bytes: Annotated[
        Positive, Meta(description="size of a mock KV block, bytes, at least 32 a token")
    ] = 4_096
    max_context: Annotated[Positive, Meta(description="tokens of prompt and answer")] = 32_768


class TokenizerSettings(Section):
    max_requests: Annotated[Positive, Meta(description="live requests owned by one tokenizer")] = 4_096
    max_attempts: Annotated[
        Positive, Meta(description="attempts of a request that fails; lost workers do not count")
    ] = 3
    threads: Annotated[Positive, Meta(description="threads for long encodes")] = 1
    tool_calls: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "json"],
        Meta(description="how the model writes tool calls; auto: as its chat template says"),
    ] = "auto"


class RouterSettings(Section):
    queue_limit: Annotated[
        Positive, Meta(description="placements waiting for room before new ones are refused")
    ] = 1_024
    max_wait_ms: Annotated[
        Positive,
        Meta(description="longest wait for a worker; a new request that would take longer is refused, ms"),
    ] = 60_000
    local_prefill_tokens: Annotated[
        Count,
        Meta(description="uncached prompts up to this long are prefilled by the decode worker; 0: never"),
    ] = 32


class KvStoreSettings(Section):
    ram_mb: Annotated[Count, Meta(description="RAM tier, MB; 0: off")] = 512
    redis_url: Annotated[
        str,
        Meta(description="Redis tier, redis://[:password@]host:port/db, rediss:// with TLS; empty: off"),
    ] = ""
    redis_ca: Annotated[
        str, Meta(description="CA file that its certificate is checked against; empty: the system's")
    ] = ""
    redis_mb: Annotated[Positive, Meta(description="most that this cluster keeps in Redis, MB")] = 4_096
    redis_ttl_s: Annotated[Positive, Meta(description="how long an unused block stays in Redis, s")] = 3_600
    tcp_host: Annotated[
        str, Meta(description="address that block transfers bind and announce; auto: as worker.tcp_host")
    ] = "127.0.0.1"
    tcp_port: Annotated[Port, Meta(description="its port; 0: any free one")] = 0


class GatewaySettings(Section):
    host: Annotated[str, Meta(description="address of the HTTP API")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="its port; 0: any free one")] = 8_000
    tls_cert: Annotated[str, Meta(description="certificate chain file: HTTPS instead of HTTP")] = ""
    tls_key: Annotated[str, Meta(description="its key file")] = ""
    api_key: Annotated[str, Meta(description="required of clients when set; never logged", extra=SECRET)] = ""
    keys_file: Annotated[
        str, Meta(description="file of hashed keys with their limits, from `baton key`; empty: none")
    ] = ""
    keys: Annotated[
        str,
        Meta(description="what such a file holds, where an environment is easier; empty: none", extra=SECRET),
    ] = ""
    cors: Annotated[
        list[str], Meta(description="origins whose pages may use the API, https://host; *: all; empty: none")
    ] = []
    max_body_mb: Annotated[Positive, Meta(description="largest request body, MB")] = 8
    bodies_mb: Annotated[Positive, Meta(description="of all bodies coming in at once, MB")] = 256
    idle_s: Annotated[
        Positive, Meta(description="a connection's wait for a request, and for all of its headers, s")
    ] = 75
    body_idle_s: Annotated[Positive, Meta(description="without a byte of a body before 408, s")] = 15
    body_s: Annotated[Positive, Meta(description="for all of a body before 408, s")] = 120
    stalled_s: Annotated[
        Positive, Meta(description="a client that takes no byte of its answer is cut off after, s")
    ] = 30
    unsent_mb: Annotated[
        Positive, Meta(description="of answers that clients do not take; then the largest is cut off, MB")
    ] = 256
    max_requests: Annotated[Positive, Meta(description="requests at once before 429")] = 2_048
    store_mb: Annotated[
        Count, Meta(description="stored responses, MB; the oldest make room for new ones; 0: none are stored")
    ] = 256
    store_ttl_s: Annotated[Positive, Meta(description="how long a stored response is kept, s")] = 2_592_000
    request_timeout_s: Annotated[Positive, Meta(description="longest life of one request, s")] = 600


class MetricsSettings(Section):
    host: Annotated[str, Meta(description="address of the cluster's /metrics")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="its port; 0: any free one")] = 9_464
    interval_ms: Annotated[Positive, Meta(description="how often services send their figures, ms")] = 2_000


class BatchSettings(Section):
    max_in_flight: Annotated[
        Count, Meta(description="requests of one model run at once; 0: as many as its workers have room for")
    ] = 0
    order: Annotated[
        Literal["prefix", "arrival"],
        Meta(description="prefix: requests whose prompts begin alike run one after the other"),
    ] = "prefix"
    max_attempts: Annotated[
        Positive, Meta(description="runs of a request that fails with 5xx; 429 and 503 do not count")
    ] = 3
    max_file_mb: Annotated[Positive, Meta(description="largest file that /v1/files takes, MB")] = 200
    files_mb: Annotated[Positive, Meta(description="most that all files take together, MB")] = 8_192
    keep_days: Annotated[
        Positive, Meta(description="how long results, finished jobs and output files are kept, days")
    ] = 30


class ServiceSettings(Section):
    state_file: Annotated[
        str,
        Meta(description="file that tells `baton doctor --probe` how this process fares; empty: none"),
    ] = ""


class TelemetrySettings(Section):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe log line shown")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="log lines for people or for machines")
    ] = "text"
    otlp_endpoint: Annotated[str, Meta(description="OTLP/HTTP endpoint for traces; empty: no tracing")] = ""
    trace_ratio: Annotated[float, Meta(ge=0, le=1, description="share of requests traced")] = 0.05


class Settings(Section):
    """Everything one can set."""

    bus: BusSettings = msgspec.field(default_factory=BusSettings)
    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    worker: WorkerSettings = msgspec.field(default_factory=WorkerSettings)
    mock: MockSettings = msgspec.field(default_factory=MockSettings)
    tokenizer: TokenizerSettings = msgspec.field(default_factory=TokenizerSettings)
    router: RouterSettings = msgspec.field(default_factory=RouterSettings)
    kvstore: KvStoreSettings = msgspec.field(default_factory=KvStoreSettings)
    gateway: GatewaySettings = msgspec.field(default_factory=GatewaySettings)
    metrics: MetricsSettings = msgspec.field(default_factory=MetricsSettings)
    batch: BatchSettings = msgspec.field(default_factory=BatchSettings)
    service: ServiceSettings = msgspec.field(default_factory=ServiceSettings)
    telemetry: TelemetrySettings = msgspec.field(default_factory=TelemetrySettings)
