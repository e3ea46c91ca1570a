"""Worker <-> worker: handing KV blocks over. The receiver pulls; nobody writes into another's memory."""

from __future__ import annotations

import msgspec

from baton.protocol.base import Message, Part, Row
from baton.protocol.errors import Failure
from baton.protocol.sequence import Fork, SequenceState


class Address(Part):
    """How a peer's KV pool can be read: by mapping its file on the same host, or over TCP."""

    host: str  # identifies a kernel and mount: equal means that `path` can be mapped
    path: str = ""  # the pool's file, mapped read-only by peers
    tcp_host: str = ""
    tcp_port: int = 0
    transports: list[str] = msgspec.field(
        default_factory=lambda: ["shm", "tcp"]
    )  # what the owner offers, best first


class BlockRef(Row):
    """One block of a peer's pool, good as long as its generation stands."""

    slot: int
    generation: int
    checksum: int  # XXH3-64 over the block's bytes


class Offer(Message):
    """Sender -> receiver (a call): I shall have these blocks. Answered `Granted` or `Refused`, at once.

    `tokens` and `salt` let the receiver compute the hashes and compare tokens before it reuses a block.
    """

    request: str
    attempt: int
    sender: str
    epoch: int
    subject: str  # the sender's control subject
    address: Address
    secret: str  # shown to the sender's TCP transport
    fingerprint: str
    tokens: bytes  # all known tokens at this time
    salt: str = ""
    priority: int = 0
    max_new_tokens: int = 0
    deadline_ms: int = 600_000


class Granted(Message):
    """Receiver -> sender: room is reserved; the first `hit_blocks` blocks are here already."""

    hit_blocks: int


class Refused(Message):
    """Receiver -> sender: no. The tokenizer will ask for another placement."""

    failure: Failure


class Ready(Message):
    """Sender -> receiver: these full blocks are finished; pull them. `first` is the first one's index."""

    request: str
    attempt: int
    epoch: int
    first: int
    blocks: list[BlockRef]


class Commit(Message):
    """Sender -> receiver (a call): the sequence is yours, with its forks and partial last block. Idempotent.

    Answered `Committed` once every block is pulled and verified, or `Refused`.
    """

    request: str
    attempt: int
    epoch: int
    state: SequenceState
    partial: BlockRef | None = None
    forks: list[Fork] = []


class Committed(Message):
    """Receiver -> sender: I own it now; drop your blocks. Sent again for a repeated `Commit`."""

    request: str
    attempt: int
    bytes_pulled: int = 0
    pull_ms: float = 0.0
    transport: str = ""


class Renew(Message):
    """Receiver -> sender: a pull is still under way; keep the blocks for another lease."""

    request: str
    attempt: int


class Abandon(Message):
    """Either way: this hand-off is over; free what it holds. Idempotent."""

    request: str
    attempt: int
    reason: str = ""
