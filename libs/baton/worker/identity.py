"""What a worker tells peers about itself."""

from __future__ import annotations

from dataclasses import dataclass

from baton.protocol.handoff import Address


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker of one epoch: its name, where its control messages go, how its KV pool can be read."""

    id: str
    epoch: int
    model: str
    subject: str
    fingerprint: str
    address: Address
    secret: str
