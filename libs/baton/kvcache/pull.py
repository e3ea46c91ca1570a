"""The words that every transport shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from baton.protocol.handoff import BlockRef

Kind = Literal["stale", "checksum", "unreachable", "refused", "timeout", "mismatch"]


class PullError(Exception):
    """A pull that failed. The destination's blocks hold rubbish from `done` on.

    Attributes:
        kind: `stale` (overwritten or released at the owner), `checksum` (what came is not what was promised),
            `unreachable` (owner gone), `refused` (secret), `timeout` (owner silent), `mismatch` (another
            epoch, block size or protocol).
        done: leading blocks that are here and verified.
    """

    def __init__(self, kind: Kind, message: str, *, done: int = 0) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: Kind = kind
        self.done = done


@dataclass(slots=True, frozen=True)
class PullStats:
    """What a pull moved, in how long, and by which transport (`shm` or `tcp`)."""

    bytes: int
    seconds: float
    transport: str


class BlockSource(Protocol):
    """What a `BlockServer` serves: blocks that are there only as long as their generation stands."""

    def resolve(self, slot: int, generation: int) -> memoryview | None:
        """The block's bytes, or None if it is not of this generation."""


class Destination(Protocol):
    """Where pulled blocks go: slots of equal size that only the puller touches until the pull is verified."""

    block_bytes: int

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, writable, uint8 [block_bytes]."""


def stale(ref: BlockRef, done: int) -> PullError:
    return PullError("stale", f"slot {ref.slot} is no longer of generation {ref.generation}", done=done)


def damaged(ref: BlockRef, done: int) -> PullError:
    return PullError("checksum", f"the bytes of slot {ref.slot} are not those announced", done=done)
