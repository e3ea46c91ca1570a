"""Jobs as they were a moment ago: every request looks at its own, and few jobs have many requests."""

from __future__ import annotations

import time

from baton.batch.records import Job
from baton.batch.state import Jobs

FRESH_S = 1.0
MOST = 1_024


class JobCache:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._seen: dict[tuple[str, str], tuple[float, Job | None]] = {}

    async def get(self, owner: str, id: str) -> Job | None:
        """A job as it was at most `FRESH_S` ago. Raises as `Jobs.get`."""
        now = time.monotonic()
        at, job = self._seen.get((owner, id), (0.0, None))
        if now - at < FRESH_S and at:
            return job
        found = await self._jobs.get(owner, id)
        if len(self._seen) > MOST:
            self._seen.clear()
        self._seen[owner, id] = now, found[0] if found is not None else None
        return self._seen[owner, id][1]

    def forget(self) -> None:
        """What comes next is looked up."""
        self._seen.clear()
