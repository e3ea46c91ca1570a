"""The load of a chaos run: streamed requests whose right answers are known."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

RETRIES = 40  # connections refused before the first byte: another gateway, as any client would
RETRY_S = 0.1
TOTAL_S = 120.0

Body = dict[str, Any]


class Cut(Exception):
    """An answer broke off, or was an error."""


@dataclass(slots=True)
class Request:
    """One request, and what became of it."""

    index: int
    body: Body
    expected: str = ""
    text: str = ""
    error: str = ""
    slowest_s: float = 0.0  # the longest time between two pieces of its answer, or before the first
    began: float = 0.0  # monotonic
    first_s: float = 0.0  # until the first piece of its answer
    seconds: float = 0.0
    left: bool = False  # its client went away on purpose
    ended: bool = False  # its last piece has come

    @property
    def lost(self) -> bool:
        return bool(self.error) and not self.left

    @property
    def wrong(self) -> bool:
        return self.ended and self.text != self.expected


def make(count: int, *, model: str, seed: int, tokens: int, longest: int) -> list[Request]:
    """Requests: prompts of 50 to `longest` tokens, half greedy, half sampled, some with penalties."""
    made = []
    rng = random.Random(seed)
    for index in range(count):
        length = rng.randrange(50, longest + 1)
        body: Body = {"model": model, "stream": True, "max_tokens": tokens, "temperature": 0}
        if model == "mock":
            body["prompt"] = [rng.randrange(97, 123) for _ in range(length)]
        else:
            body["prompt"] = " ".join(rng.choice(_WORDS) for _ in range(length))
            body["ignore_eos"] = True
        if index % 2:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": index}
        if index % 4 == 3:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.2}
        made.append(Request(index, body))
    return made


_WORDS = (
    "the",
    "of",
    "water",
    "light",
    "river",
    "stone",
    "small",
    "early",
    "winter",
    "road",
    "house",
    "quiet",
)


def expect_mock(requests: list[Request]) -> None:
    """Fills in the undisturbed texts, which the mock's rules give."""
    from baton.protocol.sampling import SamplingParams
    from baton.runner.mock import expected_tokens

    known = SamplingParams.__struct_fields__
    for request in requests:
        params = SamplingParams(**{key: value for key, value in request.body.items() if key in known})
        tokens = expected_tokens(request.body["prompt"], params)
        request.expected = bytes(tokens).decode()


@dataclass(slots=True)
class Load:
    """Sends requests, `at_once` at a time, to whichever gateways there are."""

    gateways: Callable[[], list[str]]
    at_once: int
    running: set[int] = field(default_factory=set)
    done: int = 0

    async def run(self, requests: list[Request]) -> None:
        """Returns when every request has ended, one way or the other."""
        waiting = iter(requests)

        async def client() -> None:
            async with _session() as session:
                for request in waiting:
                    self.running.add(request.index)
                    await self._one(session, request)
                    self.running.discard(request.index)
                    self.done += 1

        await asyncio.gather(*(client() for _ in range(self.at_once)))

    async def send(self, request: Request) -> None:
        """One request beside the others."""
        async with _session() as session:
            await self._one(session, request)

    async def _one(self, session: aiohttp.ClientSession, request: Request) -> None:
        request.began = began = time.monotonic()
        for attempt in range(RETRIES):
            urls = self.gateways()
            try:
                if urls:
                    await self._stream(session, random.choice(urls), request)
                    break
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
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
                raise Cut(f"{answer.status} {(await answer.text())[:200]}")
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


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TOTAL_S), connector=aiohttp.TCPConnector(limit=0)
    )


async def leave_early(load: Load, request: Request, after_s: float) -> None:
    """A client that goes away in the middle."""
    request.left = True
    async with _session() as session:
        try:
            async with asyncio.timeout(after_s):
                await load._one(session, request)
        except TimeoutError:
            return
