"""Tokenizer <-> router: where a request runs."""

from __future__ import annotations

from baton.protocol.base import Message, Part

BACKGROUND = -900  # priorities from here down: batch, which takes only what nothing else wants


class Target(Part):
    """One live process of one epoch, and the subject of its ordered control queue."""

    id: str
    epoch: int
    subject: str


class Place(Message):
    """Tokenizer -> router (a call): where should this run? No tokens travel, only block hashes.

    Answered `Placement`, or `Rejected` in time. `avoid` lists the (worker, epoch) already tried.
    """

    request: str
    attempt: int
    fingerprint: str
    tokens: int  # known tokens, the prompt and on a replay the output so far
    max_new_tokens: int
    hashes: bytes = b""  # chained hashes of the full blocks, little-endian uint64
    priority: int = 0
    deadline_ms: int = 600_000
    avoid: list[tuple[str, int]] = []
    choices: int = 1  # sequences that it becomes where it decodes
    moving: bool = False  # its KV comes along: only where to decode is asked


class Placement(Message):
    """Router -> tokenizer: run there. No `prefill` means that the decode worker reads the prompt itself."""

    decode: Target
    prefill: Target | None = None
    prefill_hit_tokens: int = 0  # a hint: the worker decides when it admits
    decode_hit_tokens: int = 0
    queued_ms: float = 0.0
    why: str = ""  # one line for people: what was weighed


class Placed(Message):
    """Tokenizer -> router: this placement is over (ended, moved or failed). Frees its share of the load."""

    request: str
    attempt: int


class Unreachable(Message):
    """Tokenizer -> router: a call to this worker found nobody. Excluded until a newer heartbeat."""

    worker: str
    epoch: int
