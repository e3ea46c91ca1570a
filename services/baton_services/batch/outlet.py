"""Storing results, each exactly once."""

from __future__ import annotations

from baton.batch import names, results
from baton.batch.results import Item, Result
from baton.batch.state import Jobs
from baton.bus.stored import WrongSequence, patiently


class Outlet:
    """A result is written only where there is none yet: whoever comes second has nothing to do."""

    def __init__(self, jobs: Jobs) -> None:
        self._streams = jobs.streams

    async def store(self, item: Item, result: Result) -> bool:
        """Stores a result for good. False: there was one already, which stays."""
        data = results.encode(item, result)
        first = await self._put(names.out(item.owner, item.job, "result", item.token), data)
        if not first:
            return not await self.settled(item)
        if result.failed:
            await self._put(names.out(item.owner, item.job, "failed", item.token), data)
        return True

    async def settled(self, item: Item) -> bool:
        """Whether a result is there. Of a failed one, whoever wrote it may have died before writing it
        among the failures."""
        subject = names.out(item.owner, item.job, "result", item.token)
        found = await patiently(lambda: self._streams.last(names.out_stream(item.owner), subject))
        if found is None:
            return False
        if results.look(found.data).failed:
            await self._put(names.out(item.owner, item.job, "failed", item.token), found.data)
        return True

    async def _put(self, subject: str, data: bytes) -> bool:
        try:
            await patiently(lambda: self._streams.publish(subject, data, expect=0))
        except WrongSequence:
            return False
        return True
