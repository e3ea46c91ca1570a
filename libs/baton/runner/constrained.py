"""A runner whose sequences may have to follow grammars: masks are made beside the inner runner's step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from baton.engine.masks import GrammarFailure
from baton.engine.plan import FAILED, Sampled, Slice, StepPlan, StepResult
from baton.kvcache.pool import KvPool
from baton.protocol.sampling import SamplingParams
from baton.runner.base import Runner

if TYPE_CHECKING:
    from baton.text.grammar.states import GrammarStates


class ConstrainedRunner:
    """Any `Runner`, which samples by `baton.engine.sampling` or otherwise heeds `SampleSpec.allowed`.

    `open_states` is called when the first constraint comes: a worker that never sees one reads no tokenizer.
    """

    def __init__(self, inner: Runner, open_states: Callable[[], GrammarStates]) -> None:
        self.inner = inner
        self._open_states = open_states
        self._opened: GrammarStates | None = None
        self._opening = Lock()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self.geometry = inner.geometry
        self.fingerprint = inner.fingerprint
        self.model = inner.model
        self.num_blocks = inner.num_blocks

    def attach(self, pool: KvPool) -> None:
        self.inner.attach(pool)

    def warm_up(self) -> None:
        self.inner.warm_up()

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """Begins to compile, in a thread, what a sequence will need; None if it can run as it is.

        Until that is done the sequence had better not be in a step: the step would wait.
        """
        constraint = params.constraint
        if constraint is None or (self._opened is not None and self._opened.knows(constraint)):
            return None
        return self._ahead.submit(lambda: self._states.prepare(constraint))

    @property
    def _states(self) -> GrammarStates:
        with self._opening:
            if self._opened is None:
                self._opened = self._open_states()
            return self._opened

    def execute(self, plan: StepPlan) -> StepResult:
        bound = [part for part in plan.slices if _is_bound(part)]
        if bound:
            self._states.step()
        for part in bound:
            if part.sample is not None:
                part.sample.allowed = self._states.begin(part.key, part.sample)
        result = self.inner.execute(plan)
        if bound:
            for part, sampled in zip(plan.slices, result.samples, strict=True):
                if sampled is not None and _is_bound(part):
                    self._take(part, sampled)
        return result

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        if self._opened is not None:
            self._opened.close()
        self.inner.close()

    def _take(self, part: Slice, sampled: Sampled) -> None:
        if sampled.token == FAILED:
            return
        try:
            sampled.complete = self._states.complete(part.key, sampled.token)
        except GrammarFailure as failure:
            sampled.token, sampled.problem = FAILED, str(failure)


def _is_bound(part: Slice) -> bool:
    return part.sample is not None and part.sample.params.constraint is not None
