"""Heartbeats and `Place`s for placement tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.placement.index import PrefixIndex
from baton.placement.placer import Placer
from baton.placement.view import ClusterView
from baton.protocol.base import pack_hashes
from baton.protocol.handoff import Address
from baton.protocol.liveness import Geometry, Heartbeat, Load, Role, State, WorkerInfo
from baton.protocol.placing import Place, Placement

BLOCK = 16
PRINT = "fingerprint"


def info(blocks: int = 100, *, slots: int = 8, step: int = 256, fingerprint: str = PRINT) -> WorkerInfo:
    return WorkerInfo(
        fingerprint=fingerprint,
        geometry=Geometry(block_size=BLOCK, block_bytes=1),
        num_blocks=blocks,
        address=Address(host="h"),
        max_batch_tokens=step,
        max_sequences=slots,
    )


def beat(
    id: str,
    role: Role = Role.DECODE,
    *,
    epoch: int = 1,
    seq: int = 1,
    state: State = State.READY,
    load: Load | None = None,
    worker: WorkerInfo | None = None,
) -> Heartbeat:
    return Heartbeat(
        role=role,
        id=id,
        epoch=epoch,
        seq=seq,
        state=state,
        subject=f"ctl.{id}",
        load=load or Load(),
        worker=worker or info(),
    )


def place(request: str, tokens: int = 100, *, hashes: list[int] | None = None, **fields: Any) -> Place:
    given = {"attempt": 0, "fingerprint": PRINT, "max_new_tokens": 16, **fields}
    packed = pack_hashes(np.asarray(hashes or [], dtype=np.uint64))
    return Place(request=request, tokens=tokens, hashes=packed, **given)


class Rig:
    """A placer over an index and a view."""

    def __init__(self, *beats: Heartbeat, local: int = 0) -> None:
        self.index = PrefixIndex()
        self.view = ClusterView()
        for one in beats:
            self.view.heard(one)
        self.placer = Placer(self.index, self.view, local_prefill_tokens=local)

    def ask(self, request: str, tokens: int = 100, *, now: float = 0.0, **fields: Any) -> Placement | None:
        return self.placer.place(place(request, tokens, **fields), now)
