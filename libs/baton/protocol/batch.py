"""Batch jobs: what a NATS client sends, and how the batch service has a gateway perform one request.

A client's messages travel as MessagePack or JSON, told apart by their first byte; they are kept in JetStream,
so they are described in docs/batch.md for clients in any language.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton.protocol.base import Message

Name = Annotated[str, Meta(min_length=1, max_length=128)]
CustomId = Annotated[str, Meta(min_length=1, max_length=512)]
Priority = Literal["high", "normal", "low"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]

MAX_EXPIRY_S = 30 * 86_400


class Asked(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="t", tag=str.lower):
    """A message of a NATS client about one of its jobs. `job` is whatever it calls the job."""

    job: Name


class Open(Asked):
    """Begins a job. `expires_s`: what has not been run after so long is given up."""

    priority: Priority = "normal"
    expires_s: Annotated[int, Meta(ge=1, le=MAX_EXPIRY_S)] = 86_400


class Request(Asked):
    """One request of a job. The first one of a `custom_id` counts."""

    custom_id: CustomId
    endpoint: Endpoint
    body: dict[str, Any]


class Close(Asked):
    """There will be no more requests: the job is completed once each has its result.

    `total`, if known, is how many there are; the job waits for that many.
    """

    total: Annotated[int, Meta(ge=0)] | None = None


class Cancel(Asked):
    """Ends a job; results that are there are kept."""


class Perform(Message):
    """Batch service -> gateway (a call): answer this request as if it had come over HTTP.

    Answered `Accepted` or `Rejected` at once, later by one `Performed` on `reply_to`.
    """

    id: str  # our own, new for each attempt
    reply_to: str
    endpoint: str
    body: bytes  # JSON
    owner: str = ""  # the key it belongs to, as stored things are bound to it


class Performed(Message):
    """Gateway -> batch service: the answer. `body` is JSON."""

    id: str
    status: int
    body: bytes
    request_id: str = ""
    retry_after_ms: int = 0


class PerformQuery(Message):
    """Batch service -> gateway (a call): are you still at it? `Accepted`, or `Rejected` with STALE."""

    id: str


class PerformCancel(Message):
    """Batch service -> gateway: nobody waits for this any more. Idempotent."""

    id: str


class Nudge(Message):
    """Gateway -> every batch service: a job was made or cancelled; look now."""
