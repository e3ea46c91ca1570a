"""The default model gives the same bits chunked or whole, cold or from a prefix, alone or among others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_llama
import torch
from tiny_llama import logits_of, piece, prefill

from baton.models.pull import pull
from baton.runner.torch_runner import TorchRunner
from baton.text.model_files import load_tokenizer

MODEL = "smollm2-135m-instruct"
LENGTH = 211
OTHERS = 15


@pytest.fixture(scope="module")
def text() -> list[int]:
    story = (Path(__file__).parents[1] / "data" / "harbour.txt").read_text()
    return load_tokenizer(pull(MODEL)).encode(story, special=False)


@pytest.fixture(scope="module")
def runner(text: list[int]) -> Iterator[TorchRunner]:
    before = torch.get_num_threads()
    made = tiny_llama.runner(MODEL, blocks=150, threads=2)
    yield made
    made.close()
    torch.set_num_threads(before)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_same_bits_everywhere(runner: TorchRunner, text: list[int]) -> None:
    tokens = text[:LENGTH]
    blocks = list(range(14))
    whole = prefill(runner, tokens, blocks)
    assert torch.isfinite(whole).all()
    scattered = random.Random(0).sample(range(20, 150), 14)
    assert equal_bits(prefill(runner, tokens, scattered, 16), whole), "in chunks of 16, in other pages"
    hit = logits_of(runner, [piece(tokens, 96, LENGTH, scattered[:6] + blocks[6:])])[0]
    assert equal_bits(hit, whole), "after a prefix of six blocks found elsewhere"
    torch.set_num_threads(1)
    one_thread = logits_of(runner, [piece(tokens, LENGTH - 1, LENGTH, blocks)])[0]
    torch.set_num_threads(2)
    assert equal_bits(one_thread, whole), "as a decode, by one thread"


def test_same_bits_among_others(runner: TorchRunner, text: list[int]) -> None:
    tokens, blocks = text[:LENGTH], list(range(14))
    alone = prefill(runner, tokens, blocks)
    draw = random.Random(1)
    places = draw.sample(range(LENGTH), OTHERS - 1)
    others = [piece(text, at, at + 1, blocks, str(at)) for at in places]
    chunk = piece(text, 0, 40, [140, 141, 142], "chunk")
    place = 7
    mixed = [*others[:place], piece(tokens, LENGTH - 1, LENGTH, blocks), *others[place:], chunk]
    assert equal_bits(logits_of(runner, mixed)[place], alone)
