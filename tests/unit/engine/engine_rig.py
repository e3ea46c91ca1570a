"""An engine with the mock runner over real pages, driven by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from baton.config.settings import Settings
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, Progress
from baton.engine.plan import StepPlan
from baton.engine.sequence import Sequence
from baton.kvcache.pool import KvPool
from baton.protocol.errors import Code, RequestError
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import VOCAB, MockRunner, expected_tokens

BLOCK: Final = 8


@contextmanager
def refused(code: Code, words: str | None = None) -> Iterator[None]:
    """The body raises a `RequestError` of this code, and its message has these words."""
    with pytest.raises(RequestError, match=words) as error:
        yield
    assert error.value.failure.code is code


class Rig:
    """`blocks` pages of 8 tokens; limits as keyword arguments of `EngineConfig`."""

    def __init__(self, blocks: int = 64, **limits: Any) -> None:
        settings = Settings()
        settings.model.block_size = BLOCK
        settings.mock.block_bytes = BLOCK * 32
        settings.mock.step_us = settings.mock.token_us = 0
        self.runner = MockRunner(settings)
        self.pages = KvPool.create_private(self.runner.geometry, blocks)
        self.runner.attach(self.pages)
        self.pool = BlockPool(blocks, BLOCK, self.pages.generations)
        limits = {"max_context": 4_096, "vocab_size": VOCAB, **limits}
        self.engine = Engine(EngineConfig(fingerprint=self.runner.fingerprint, **limits), self.pool)
        self.now = 0.0
        self.news: list[Progress] = []  # of the last step

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        attempt: int = 1,
        priority: int = 0,
        salt: str = "",
        prefill_only: bool = False,
    ) -> Sequence:
        seq = Sequence(
            name,
            attempt,
            list(prompt),
            len(prompt),
            params or SamplingParams(max_tokens=8),
            priority=priority,
            salt=salt,
            prefill_only=prefill_only,
            arrived=self.now,
        )
        self.engine.add(seq)
        return seq

    def step(self) -> StepPlan | None:
        """One whole step, invariants checked at each border."""
        self.now += 1.0
        plan = self.engine.schedule(self.now)
        self.engine.check()
        self.news = []
        if plan is not None:
            self.news = self.engine.commit(plan, self.runner.execute(plan), self.now)
            self.engine.check()
        return plan

    def run(self, limit: int = 10_000) -> int:
        """Steps until nothing is left to do."""
        for count in range(limit):
            if not self.engine.has_work:
                return count
            assert self.step() is not None, "work, but nothing can run"
        raise AssertionError(f"not done after {limit} steps")


def text(seed: int, length: int) -> list[int]:
    """Some prompt: the same for the same seed, and different from the first token on otherwise."""
    return [(seed * 37 + at * at * 11 + at * 5) % 256 for at in range(length)]


def undisturbed(seq: Sequence) -> list[int]:
    """What the sequence must have generated."""
    return expected_tokens(seq.tokens[: seq.prompt_len], seq.sampling, choice=seq.choice)
