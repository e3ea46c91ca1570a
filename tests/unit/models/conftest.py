"""What tests of the models share: the real file."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.models.pull import pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, from the cache or pulled into it."""
    return pull("smollm2-135m-instruct").path
