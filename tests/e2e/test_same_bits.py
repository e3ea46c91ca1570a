"""The same request gives the same tokens and the same logprobs, bit for bit, wherever and however it runs.

Logprobs travel as JSON numbers with all their digits, so equal text means equal bits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running import Running

MODEL = "smollm2-135m-instruct"
COMMON = ("--model", MODEL, "--kv-memory-mb", "128")
# name: flags. Handed over through shared memory, handed over by TCP in chunks of 16, and not handed over.
WAYS = {
    "shm": ("--router-local-prefill-tokens", "0", "--decode", "2"),
    "tcp": ("--router-local-prefill-tokens", "0", "--worker-transports", "tcp", "--max-batch-tokens", "16"),
    "local": ("--router-local-prefill-tokens", "100000", "--no-prefix-cache", "--threads", "2"),
}

Answer = tuple[str, tuple[float, ...]]


def prompts() -> list[str]:
    text = (Path(__file__).parents[1] / "data" / "night_train.txt").read_text()
    words = text.split()
    return [" ".join(words[start : start + length]) for start, length in ((0, 4), (40, 30), (300, 420))]


def ask(baton: Running, prompt: str) -> Answer:
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    body |= {"temperature": 0, "logprobs": 0}
    status, answer = baton.post("/v1/completions", body, timeout=120)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == 16
    return choice["text"], tuple(choice["logprobs"]["token_logprobs"])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """Each way's answers; of `shm` also the second time, with prefix hits, and among 15 others."""
    found: dict[str, list[Answer]] = {}
    for name, flags in WAYS.items():
        with Running(tmp_path_factory.mktemp(name), *COMMON, *flags) as baton:
            found[name] = [ask(baton, prompt) for prompt in prompts()]
            if name == "shm":
                found["prefix hit"] = [ask(baton, prompt) for prompt in prompts()]
                crowd = [f"{number} {prompt}" for number in range(5) for prompt in prompts()]
                with ThreadPoolExecutor(16) as pool:
                    others = [pool.submit(ask, baton, prompt) for prompt in crowd]
                    found["among others"] = list(pool.map(lambda prompt: ask(baton, prompt), prompts()))
                    for other in others:
                        other.result()
                found["moved bytes"] = [("", (baton.settled("baton_handoff_bytes_total", transport="shm"),))]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["prefix hit", "among others", "tcp", "local"])
def test_same_bits(answers: dict[str, list[Answer]], way: str) -> None:
    assert answers[way] == answers["shm"]


@pytest.mark.timeout(300)
def test_blocks_were_handed_over(answers: dict[str, list[Answer]]) -> None:
    assert answers["moved bytes"][0][1][0] > 0
