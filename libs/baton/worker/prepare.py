"""What a sequence needs before a step may have it: its grammar, compiled in a thread of the runner's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from baton.protocol.sampling import SamplingParams

Prepare = Callable[[SamplingParams], "Future[None] | None"]


async def prepared(needs: Future[None] | None) -> None:
    """Returns once it is done; what failed there is said by the step."""
    if needs is not None:
        await asyncio.wait([asyncio.wrap_future(needs)])
