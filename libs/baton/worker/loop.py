"""The engine loop: schedule on the event loop, execute in a thread, commit on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from baton.engine.engine import Engine, Progress
from baton.engine.plan import StepPlan, StepResult
from baton.runner.base import Runner
from baton.telemetry.logs import get_logger

log = get_logger(__name__)

# Work that cannot be scheduled waits for blocks that something else holds; look again this often.
BLOCKED_ROUND_S = 0.02
FAILED_STEPS_IN_A_ROW = 3
# A step lasts about this long at most, so that a cancelled sequence is gone within a second.
STEP_S = 0.2
FEWEST_TOKENS = 16


class EngineFailed(RuntimeError):
    """Steps keep failing: this worker cannot work."""


class EngineLoop:
    """Runs steps as long as there is work. Engine state is only touched on the event loop.

    `scheduled(plan)` is called before a step runs, `progressed(progress)` after it is committed, and
    `failed(plan)` when the runner raised: the step's sequences are then the caller's to end.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        *,
        scheduled: Callable[[StepPlan], None],
        progressed: Callable[[list[Progress]], Awaitable[None]],
        failed: Callable[[StepPlan], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._scheduled = scheduled
        self._progressed = progressed
        self._failed = failed
        self.work = asyncio.Event()  # set: there may be something to do
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.stepping_since: float | None = None  # monotonic: a step is being executed

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            EngineFailed: several steps in a row failed.
        """
        failures = 0
        while True:
            plan = self._engine.schedule(time.monotonic())
            if plan is None:
                await self._rest()
                continue
            self._scheduled(plan)
            try:
                progress = await self._step(plan)
            except Exception as error:
                failures += 1
                log.exception("step %d failed", plan.number)
                await self._failed(plan)
                nothing = StepResult([None] * len(plan.slices))
                self._engine.commit(plan, nothing, time.monotonic())
                if failures >= FAILED_STEPS_IN_A_ROW:
                    raise EngineFailed(f"{failures} steps in a row failed: {error}") from error
                continue
            failures = 0
            await self._progressed(progress)

    async def _step(self, plan: StepPlan) -> list[Progress]:
        self.stepping_since = started = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._thread, self._runner.execute, plan)
        finally:
            self.stepping_since = None
        now = time.monotonic()
        self._pace(plan.num_tokens, now - started)
        return self._engine.commit(plan, result, now)

    def _pace(self, tokens: int, seconds: float) -> None:
        """Fits the step's token budget to this machine: halved after a long step, then grown bit by bit."""
        scheduler, most = self._engine.scheduler, self._engine.config.max_batch_tokens
        if seconds > STEP_S and tokens > FEWEST_TOKENS:
            scheduler.budget = max(FEWEST_TOKENS, len(scheduler.running) + 1, tokens // 2)
        elif seconds < STEP_S / 2 and tokens >= scheduler.budget // 2:
            scheduler.budget = min(most, scheduler.budget + FEWEST_TOKENS)

    async def _rest(self) -> None:
        self.work.clear()
        try:
            timeout = BLOCKED_ROUND_S if self._engine.has_work else None
            await asyncio.wait_for(self.work.wait(), timeout)
        except TimeoutError:
            pass

    def close(self) -> None:
        """Waits for the step in flight; the pool may be unmapped afterwards. Blocks."""
        self._thread.shutdown(wait=True, cancel_futures=True)
