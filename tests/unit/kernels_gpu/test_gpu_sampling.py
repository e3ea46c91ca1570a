"""Sampling on the device gives the CPU's tokens for the same logits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from baton.engine.plan import FAILED, SampleSpec
from baton.engine.sampling import sample as sample_on_cpu
from baton.protocol.sampling import SamplingParams
from baton.runner.triton_sampling import choose
from baton_kernels.gpu import sampling


class Words:
    """A grammar's mask that is there already."""

    def __init__(self, allowed: np.ndarray, vocab: int) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
        bits[allowed] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.uint32)

    def words(self) -> np.ndarray:
        return self._words


def spec(vocab: int, **params: Any) -> SampleSpec:
    prompt = [random.randrange(vocab) for _ in range(20)]
    output = [random.randrange(vocab) for _ in range(random.randrange(12))]
    chosen = SamplingParams(seed=random.getrandbits(63), **params)
    return SampleSpec(chosen, random.randrange(3), len(output), prompt + output, len(prompt))


def check(logits: np.ndarray, specs: list[SampleSpec], vocab: int, device: str) -> list[int]:
    expected = [sample_on_cpu(row[:vocab].copy(), one).token for row, one in zip(logits, specs, strict=True)]
    on_device = torch.from_numpy(logits.copy()).to(device)
    got = [one.token for one in choose(on_device, vocab, specs)]
    assert got == expected
    return got


RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 2.5, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 30, "min_p": 0.05, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.5},
    {"temperature": 0.0, "repetition_penalty": 0.7},
    {"temperature": 1.0, "logit_bias": {3: 4.5, 900: -100.0}, "top_p": 0.95},
    {"temperature": 0.0, "min_tokens": 50, "stop_token_ids": [1, 5, 700]},
    {"temperature": 0.3, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "logprobs": 3},
]


def test_the_cpus_tokens(device: str) -> None:
    vocab = 700
    specs = [spec(vocab, **rules) for rules in RULES]
    for one in specs:
        one.params.logit_bias = {token % vocab: bias for token, bias in one.params.logit_bias.items()}
        one.params.stop_token_ids = [token % vocab for token in one.params.stop_token_ids]
    logits = (np.random.randn(len(specs), vocab + 9) * 3).astype(np.float32)
    logits[:, vocab:] = 99.0  # padding that must never be chosen
    check(logits, specs, vocab, device)


def test_ties_go_to_the_lower_id(device: str) -> None:
    logits = np.round(np.random.randn(4, 600) * 2).astype(np.float32)  # few values, many equal
    logits[:, 7] = -0.0
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0, "top_k": 70}, {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 3.0, "top_k": 300, "top_p": 0.9, "min_p": 0.01},
    ]  # fmt: skip
    for _ in range(2):
        check(logits, [spec(600, **rule) for rule in rules], 600, device)


def test_grammars(device: str) -> None:
    vocab = 600
    specs = [
        spec(vocab, temperature=1.0, top_p=0.9),
        spec(vocab, temperature=0.0),
        spec(vocab, temperature=1.0),
    ]
    allowed = [np.random.choice(vocab, 9, replace=False), np.array([599]), None]
    for one, ids in zip(specs, allowed, strict=True):
        one.allowed = None if ids is None else Words(ids, vocab)
    logits = np.random.randn(3, vocab).astype(np.float32)
    got = check(logits, specs, vocab, device)
    assert got[0] in set(allowed[0].tolist())  # type: ignore[union-attr]
    assert got[1] == 599


def test_rows_that_are_not_finite_fail_alone(device: str) -> None:
    logits = np.random.randn(4, 520).astype(np.float32)
    logits[0, 3], logits[1, 500], logits[2] = np.nan, np.inf, -np.inf
    rules = {"temperature": 1.0, "top_k": 20}
    got = check(logits, [spec(520, **rules) for _ in range(4)], 520, device)
    assert got[:3] == [FAILED] * 3
    assert got[3] != FAILED


def test_peaked_and_flat_rows(device: str) -> None:
    """Weights that underflow, and a row of one value: every id is as likely."""
    logits = np.full((3, 700), -5_000.0, dtype=np.float32)
    logits[0, 333] = 0.0
    logits[1, [5, 6]] = 10.0
    logits[2] = 1.5
    check(logits, [spec(700, temperature=1.0, top_p=0.9) for _ in range(3)], 700, device)


def test_a_draw_at_the_end_finds_a_token(device: str) -> None:
    scores = torch.zeros(1, 600, device=device)
    scores[0, 550:] = float("-inf")
    real = torch.tensor([[1.0, 1.0, sampling.NO_MIN_P, 1.0]], dtype=torch.float64, device=device)
    tokens = torch.zeros(1, dtype=torch.int32, device=device)
    sampling.sample(scores, 600, torch.zeros(1, 2, dtype=torch.int32, device=device), real, tokens)
    assert tokens.item() == 549
