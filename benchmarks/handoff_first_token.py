"""What a hand-off adds to the first token: one cluster hands all prompts over, another beside it none."""

from __future__ import annotations

import random
import statistics
from contextlib import AsyncExitStack
from pathlib import Path

from baton.cli.chaos.load import Load
from baton.cli.chaos.requests import Request
from baton.cli.chaos.stage import Stage, staged
from baton.config.settings import Settings
from baton.protocol.liveness import Role

COUNTS = dict.fromkeys((Role.PREFILL, Role.DECODE, Role.ROUTER, Role.TOKENIZER, Role.GATEWAY), 1)
WORDS = ("water", "light", "river", "stone", "small", "early", "winter", "road", "house", "quiet")
LOCAL = {"handed over": 0, "where it decodes": 1_000_000}  # router.local_prefill_tokens


async def first_tokens(folder: Path, tokens: int, runs: int) -> dict[str, float]:
    """Median seconds to the first token of a prompt of `tokens`, by where it is read.

    One request at a time, the two clusters in turn, no prompt twice.
    """
    times: dict[str, list[float]] = {name: [] for name in LOCAL}
    async with AsyncExitStack() as stack:
        stages = {}
        for name, local in LOCAL.items():
            settings = Settings()
            settings.router.local_prefill_tokens = local
            own = folder / name.replace(" ", "-")
            own.mkdir()
            stages[name] = await stack.enter_async_context(staged(settings, COUNTS, own, own / "log"))
        for run in range(runs + 1):
            for name, stage in stages.items():
                seconds = await _first_token(stage, tokens, run)
                if run:  # the first of each warms everything up
                    times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


async def _first_token(stage: Stage, tokens: int, seed: int) -> float:
    rng = random.Random(seed)
    body = {
        "model": stage.settings.model.name,
        "prompt": " ".join(rng.choice(WORDS) for _ in range(tokens)),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = Request(0, body)
    await Load(stage.gateways, 1).send(request)
    if request.error:
        raise RuntimeError(request.error)
    return request.first_s
