"""Two models in one cluster: the gateway lists both, and routes by name and alias."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running
from secured import BATON

REAL = "smollm2-135m-instruct"


class Cluster:
    """A whole Baton with the mock, and beside it what serves a second model on the same bus."""

    def __init__(self, folder: Path) -> None:
        self.running = Running(
            folder, "--engine", "mock", "--kv-memory-mb", "8", "--model-aliases", "echo,toy"
        )
        run = self.running.run
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(Path.home()),
            "BATON_BUS_URL": run.nats_url,
            "BATON_BUS_USER": run.nats_user,
            "BATON_BUS_PASSWORD": run.nats_password,
            "BATON_MODEL_NAME": REAL,
            "BATON_MODEL_ALIASES": "gpt-4o-mini,echo",
            "BATON_WORKER_SHM_DIR": str(self.running.shm),
            "BATON_WORKER_KV_MEMORY_MB": "64",
            "BATON_WORKER_THREADS": "1",
        }
        self.second: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for role in ("tokenizer", "router", "decode"):
                self.start(role)
            self.wait_for(REAL)
        except BaseException:
            self.stop()
            raise

    def start(self, role: str) -> None:
        self.second[role] = subprocess.Popen(
            [*BATON, "serve", role], env=self.environ, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def listed(self) -> set[str]:
        _, answer = self.running.get("/v1/models")
        return {model["id"] for model in answer["data"]}

    def wait_for(self, name: str, *, there: bool = True) -> None:
        deadline = time.monotonic() + 60
        while (name in self.listed()) != there:
            assert time.monotonic() < deadline, f"{name}: {self.listed()}"
            time.sleep(0.1)

    def complete(self, model: str) -> tuple[int, str]:
        """(status, text or error code)."""
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
        status, answer = self.running.post("/v1/completions", body)
        return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["code"]

    def stop(self) -> None:
        for process in self.second.values():
            process.terminate()
        for process in self.second.values():
            process.wait(40)
        self.running.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("models"))
    yield made
    made.stop()


def test_both_are_listed_and_answer_by_name_and_alias(cluster: Cluster) -> None:
    assert cluster.listed() == {"mock", "toy", "echo", REAL, "gpt-4o-mini"}
    status, text = cluster.complete(REAL)
    assert status == 200 and "Paris" in text
    assert cluster.complete("gpt-4o-mini") == (200, text)
    status, mocked = cluster.complete("mock")
    assert status == 200 and mocked != text
    assert cluster.complete("toy") == (200, mocked)


def test_an_alias_of_both_is_the_first_ones(cluster: Cluster) -> None:
    assert cluster.complete("echo") == cluster.complete("mock")


def test_what_nobody_serves_is_said(cluster: Cluster) -> None:
    assert cluster.complete("gpt-5") == (404, "model_not_found")


def test_one_goes_the_other_stays(cluster: Cluster) -> None:
    tokenizer = cluster.second["tokenizer"]
    tokenizer.terminate()
    tokenizer.wait(40)
    cluster.wait_for(REAL, there=False)
    assert cluster.listed() == {"mock", "toy", "echo"}
    assert cluster.complete("mock")[0] == 200
    cluster.start("tokenizer")
    cluster.wait_for(REAL)
    status, text = cluster.complete("gpt-4o-mini")
    assert status == 200 and "Paris" in text
