"""Who is alive, what it can do, and how busy it is."""

from __future__ import annotations

import enum

from baton.protocol.base import Message, Part
from baton.protocol.handoff import Address


class Role(enum.StrEnum):
    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    METRICS = "metrics"
    BATCH = "batch"


class State(enum.StrEnum):
    STARTING = "starting"  # alive, not to be used yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    UNHEALTHY = "unhealthy"  # alive on the bus, but cannot work
    STOPPED = "stopped"  # said once, on the way out


class Geometry(Part):
    """The shape of one KV block: [layers, 2, kv_heads, block_size, head_dim] of `dtype`, contiguous."""

    block_size: int  # tokens
    block_bytes: int
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""


class ModelInfo(Part):
    """What a model is called and how much it takes."""

    name: str
    max_context: int
    vocab_size: int = 0
    created: int = 0  # Unix seconds
    aliases: list[str] = []
    reasons: bool = False  # its template knows think tags


class WorkerInfo(Part):
    """What a worker is: fixed for its epoch."""

    fingerprint: str
    geometry: Geometry
    num_blocks: int
    address: Address
    max_batch_tokens: int = 0
    max_sequences: int = 0  # in one step


class Load(Part):
    """How busy a worker was when it sent this."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0  # held by live sequences
    blocks_total: int = 0
    waiting_tokens: int = 0  # tokens still to prefill, in the queue and in progress
    placements: list[tuple[str, int]] = []  # (request, attempt) taken since the heartbeat before
    kv_event: int = 0  # number of the last KV event sent


class Heartbeat(Message):
    """Every service, every `interval_ms`, on its own heartbeat subject; at once when `state` changes."""

    role: Role
    id: str
    epoch: int
    model: str = ""
    subject: str = ""  # where its control messages go
    seq: int = 0
    interval_ms: int = 1_000
    started_ms: int = 0  # wall clock, for "the oldest"; never for time-outs
    state: State = State.STARTING
    routable: bool = False  # a tokenizer or router: a request sent now would find workers
    pid: int = 0
    host: str = ""
    version: str = ""
    url: str = ""  # a gateway's or metrics service's HTTP address
    note: str = ""  # why it is not ready, for people
    model_info: ModelInfo | None = None
    worker: WorkerInfo | None = None
    load: Load | None = None


class Ask(Message):
    """A new directory -> every service: send a heartbeat now (spread over 50 ms)."""
