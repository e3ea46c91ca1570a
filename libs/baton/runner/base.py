"""What executes a step: the contract between a worker and its model."""

from __future__ import annotations

from typing import Protocol

from baton.engine.plan import StepPlan, StepResult
from baton.kvcache.pool import KvPool
from baton.protocol.liveness import Geometry, ModelInfo


class Runner(Protocol):
    """Runs the model over pages of a KV pool.

    `execute` blocks; a worker calls it in one thread, one step at a time, off its event loop. A row's
    result depends on its own tokens alone: not on its neighbours, chunk borders, cache hits or slots.
    """

    geometry: Geometry
    fingerprint: str  # pairing, prefix reuse and replay stay within one
    model: ModelInfo
    num_blocks: int  # pool size that the settings ask for

    def attach(self, pool: KvPool) -> None:
        """Use this pool's pages. Once, before the first step."""
        ...

    def warm_up(self) -> None:
        """Pay one-time costs (compiling, first allocations) before the first request does."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute every slice: write its K and V to its pages, and sample where asked."""
        ...

    def close(self) -> None:
        """Let go of the model and the pool's pages. Idempotent."""
        ...
