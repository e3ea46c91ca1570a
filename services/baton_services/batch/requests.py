"""One request of a job, from the queue to its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import xxhash

from baton.batch import results
from baton.batch.records import Job
from baton.batch.results import Item, Result
from baton.bus.stored import AWAY, patiently
from baton.protocol.batch import Performed
from baton_services.batch.pace import Pace
from baton_services.batch.performer import Lost, Performer, backoff_s

WAIT_MS = 1_000  # after a 429 or 503 that does not say how long
LOOK_S = 1.0  # how soon a request of a job that has ended is given up
RANK = {"high": -998, "normal": -999, "low": -1_000}  # below whatever is interactive
_SEEDED = ("/v1/chat/completions", "/v1/completions")
_REFUSED = (429, 503)
_GIVEN_UP = 499  # by a gateway that shuts down

_json = msgspec.json.Encoder().encode


class JobOver(Exception):
    """The job takes no more results."""


class Runner:
    """Runs requests, again and again where that helps."""

    def __init__(
        self,
        performer: Performer,
        job: Callable[[str, str], Awaitable[Job | None]],
        *,
        max_attempts: int,
    ) -> None:
        """`job`: a job as it was a moment ago."""
        self._performer = performer
        self._job = job
        self._max_attempts = max_attempts

    async def run(self, item: Item, priority: str, pace: Pace) -> Result:
        """The result of a request: its answer, or why there is none.

        Raises:
            JobOver: the job has ended meanwhile.
        """
        body = prepare(item, priority)
        work = asyncio.create_task(self._attempts(item, body, pace))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=LOOK_S)
                if not work.done() and not await self.wanted(item):
                    raise JobOver(item.job)
            return work.result()
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    async def wanted(self, item: Item) -> bool:
        """Whether its job still runs; while the bus is away, as far as is known it does."""
        try:
            job = await self._job(item.owner, item.job)
        except AWAY:
            return True
        return job is None or _runs(job)

    async def known(self, item: Item) -> bool | None:
        """As `wanted`; None if there is no such job, as a replica of the store that lags may say."""
        job = await patiently(lambda: self._job(item.owner, item.job))
        return None if job is None else _runs(job)

    async def _attempts(self, item: Item, body: bytes, pace: Pace) -> Result:
        tries = lost = 0
        while True:
            try:
                answer = await self._performer.perform(item.endpoint, body, item.owner)
            except Lost:
                lost += 1
                await asyncio.sleep(backoff_s(lost))
                continue
            if answer.status in _REFUSED:
                wait_s = (answer.retry_after_ms or WAIT_MS) / 1_000
                pace.refused(time.monotonic(), wait_s)
                await asyncio.sleep(wait_s)
            elif answer.status == _GIVEN_UP:
                await asyncio.sleep(backoff_s(0))
            elif not _may_pass(answer) or (tries := tries + 1) >= self._max_attempts:
                return results.answered(item, answer.status, answer.request_id, answer.body)
            else:
                await asyncio.sleep(backoff_s(tries))


def _runs(job: Job) -> bool:
    # A request is there only once its job is in progress; an older state is one that has not spread yet.
    return job.status in ("validating", "in_progress") and not job.lapsed


def _may_pass(answer: Performed) -> bool:
    """Whether a second try may do better: a defect, or a model whose last tokenizer is being replaced."""
    return answer.status >= 500 or (answer.status == 404 and b'"model_not_found"' in answer.body)


def prepare(item: Item, priority: str) -> bytes:
    """The body as it is asked: below all that is interactive, and with a seed, so that it can run again."""
    body: dict[str, Any] = msgspec.json.decode(item.body, type=dict[str, msgspec.Raw])
    body["priority"] = RANK[priority]
    if item.endpoint in _SEEDED and bytes(body.get("seed", b"null")) == b"null":
        body["seed"] = xxhash.xxh3_64_intdigest(item.custom_id.encode()) >> 1
    return _json(body)
