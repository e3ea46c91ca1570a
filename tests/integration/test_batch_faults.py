"""A job while all that it needs is killed in turn: each request has one result, the same as ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from batch_jobs import begin, jsonl, line, look, results, texts, wait
from running import Running

from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton.text.mock import TEMPLATE, mock_tokenizer
from baton.text.templates import ChatTemplate, encode_chat

KILLS = ("batch-0", "router-0", "prefill-0", "nats", "decode-0")
TOKENS = 32


def _pid(baton: Running, name: str) -> int:
    """The process of a service; of the NATS server for `nats`. 0 while it is away."""
    for child in psutil.Process(baton.process.pid).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.Error:
            continue
        if name in command or (name == "nats" and command and "nats-server" in command[0]):
            return child.pid
    return 0


def _requests(count: int) -> Iterator[dict[str, Any]]:
    """Half of them greedy, half sampled with a seed; prompts of some 100 tokens."""
    for i in range(count):
        how = {"temperature": 0} if i % 2 else {"seed": i}
        yield line(f"request {i}", f"question {i % 7} " * 8 + str(i), max_tokens=TOKENS, **how)


def _expected(requests: Iterator[dict[str, Any]]) -> dict[str, str]:
    """What the mock answers, undisturbed."""
    tokenizer, template, found = mock_tokenizer(), ChatTemplate(TEMPLATE, {}), {}
    for one in requests:
        body = one["body"]
        how = {"temperature": body.get("temperature", 1.0), "seed": body.get("seed", 0)}
        prompt = encode_chat(tokenizer, template, body["messages"])
        made = expected_tokens(prompt, SamplingParams(max_tokens=TOKENS, **how))
        found[one["custom_id"]] = bytes(token for token in made if token < 256).decode()
    return found


def _killed_in_turn(folder: Path, count: int, every_s: float, most: int, limit_s: float, *flags: str) -> int:
    """Runs a job while one process after the other is killed, `most` at most. How many kills there were."""
    kills = 0
    with Running(folder, "--engine", "mock", *flags) as baton:
        id, at = begin(baton, jsonl(_requests(count))), time.monotonic() + every_s / 2
        until = time.monotonic() + limit_s
        while (batch := look(baton, id))["status"] not in ("completed", "failed"):
            assert time.monotonic() < until, f"{kills} kills, {batch['request_counts']}: {baton.log[-3_000:]}"
            if time.monotonic() >= at and kills < most:
                victim = _pid(baton, KILLS[kills % len(KILLS)])
                if victim:
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
                at = time.monotonic() + every_s
            time.sleep(0.2)
        batch = wait(baton, id)
        assert batch["status"] == "completed", batch
        assert batch["error_file_id"] is None, results(baton, batch["error_file_id"])[:3]
        got = texts(results(baton, batch["output_file_id"]))
    assert got == _expected(_requests(count))
    return kills


@pytest.mark.slow
def test_a_job_survives_a_kill_of_everything(tmp_path: Path) -> None:
    flags = ("--mock-step-us", "20000", "--worker-max-sequences", "16")
    # The machine that runs the tests needs some seconds to start what was killed.
    assert _killed_in_turn(tmp_path, 350, 2.0, len(KILLS), 90, *flags) == len(KILLS)


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_5000_requests_survive_kills_of_everything_in_turn(tmp_path: Path) -> None:
    kills = _killed_in_turn(tmp_path, 5_000, 5.0, 100, 400, "--mock-step-us", "20000")
    print(f"{kills} kills")
    assert kills >= 8
