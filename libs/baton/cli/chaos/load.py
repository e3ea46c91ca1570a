"""The load of a chaos run: streamed requests, all at once, or at a given rate."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from baton.cli.chaos.requests import Request

RETRIES = 100  # connections refused before the first byte: another gateway, as any client would
RETRY_S = 0.1
TOTAL_S = 240.0
BURST = 6  # requests that come together: a rate alone would seldom have several in flight


class Cut(Exception):
    """An answer broke off, or was an error."""


class TurnedAway(Exception):
    """A gateway that drains: as its answer says, another one serves."""


@dataclass(slots=True)
class Load:
    """Sends requests to whichever gateways there are: `at_once` in flight, or `rate` a second in bursts."""

    gateways: Callable[[], list[str]]
    at_once: int
    rate: float = 0.0
    running: set[int] = field(default_factory=set)
    done: int = 0

    async def run(self, requests: list[Request]) -> None:
        """Returns when every request has ended, one way or the other."""
        async with _session() as session:
            if self.rate:
                await self._at_rate(session, requests)
            else:
                waiting = iter(requests)
                await asyncio.gather(*(self._client(session, waiting) for _ in range(self.at_once)))

    async def send(self, request: Request) -> None:
        """One request beside the others."""
        async with _session() as session:
            await self._one(session, request)

    async def _at_rate(self, session: aiohttp.ClientSession, requests: list[Request]) -> None:
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(requests), BURST):
                burst = requests[start : start + BURST]
                for request in burst:
                    group.create_task(self._client(session, iter([request])))
                await asyncio.sleep(len(burst) / self.rate)

    async def _client(self, session: aiohttp.ClientSession, waiting: Iterator[Request]) -> None:
        for request in waiting:
            self.running.add(request.index)
            await self._one(session, request)
            self.running.discard(request.index)
            self.done += 1

    async def _one(self, session: aiohttp.ClientSession, request: Request) -> None:
        request.began = began = time.monotonic()
        for attempt in range(RETRIES):
            urls = self.gateways()
            try:
                if urls:
                    await self._stream(session, random.choice(urls), request)
                    break
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, TurnedAway) as error:
                if request.text or attempt + 1 == RETRIES:
                    request.error = f"{type(error).__name__}: {error}"
                    break
            except (aiohttp.ClientError, Cut, TimeoutError) as error:
                request.error = f"{type(error).__name__}: {error}"
                break
            await asyncio.sleep(RETRY_S)
        else:
            request.error = "no gateway"
        request.seconds = time.monotonic() - began

    async def _stream(self, session: aiohttp.ClientSession, url: str, request: Request) -> None:
        before = time.monotonic()
        async with session.post(f"{url}/v1/completions", json=request.body) as answer:
            if answer.status != 200:
                words = f"{answer.status} {(await answer.text())[:200]}"
                raise TurnedAway(words) if "server_is_draining" in words else Cut(words)
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                request.first_s = request.first_s or now - request.began
                request.slowest_s = max(request.slowest_s, now - before)
                before = now
                if line.strip() == b"data: [DONE]":
                    request.ended = True
                    break
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise Cut(f"error in the stream: {piece['error']}")
                if piece["choices"]:
                    request.text += piece["choices"][0]["text"]
        if not request.ended:
            raise Cut("the stream ended without [DONE]")

    async def leave_early(self, request: Request, after_s: float) -> None:
        """A client that goes away in the middle."""
        request.left = True
        async with _session() as session:
            try:
                async with asyncio.timeout(after_s):
                    await self._one(session, request)
            except TimeoutError:
                return


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TOTAL_S), connector=aiohttp.TCPConnector(limit=0)
    )
