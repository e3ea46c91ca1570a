"""One Baton on the mock engine for every client that needs no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running import Running

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "16", "--router-local-prefill-tokens", "0",
    "--mock-step-us", "300", "--mock-token-us", "5", "--mock-max-context", "4096",
)  # fmt: skip


@pytest.fixture(scope="session")
def shared_baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("clients"), *FLAGS) as running:
        yield running
        assert "Traceback" not in running.log
