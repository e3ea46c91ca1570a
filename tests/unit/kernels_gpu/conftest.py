"""Kernels on the CPU, by Triton's interpreter; fresh random inputs whose seed a failure shows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import interpreted
import numpy as np
import pytest
import torch


@pytest.fixture
def device() -> str:
    return interpreted.DEVICE


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """A seed of the moment: set `SEED` here to the one printed to see a failure again."""
    chosen = random.SystemRandom().randrange(1 << 31)
    print(f"seed {chosen}")
    torch.manual_seed(chosen)
    np.random.seed(chosen)
    random.seed(chosen)
    yield chosen
