"""The same bits whatever is computed beside a row, in which chunks, pages and threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import torch
from tiny_llama import logits_of, piece, prefill

from baton.engine.plan import Slice
from baton.runner.torch_runner import TorchRunner

BLOCK = 16
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one KV head": {"num_key_value_heads": 1},
    "no shared heads, odd sizes": {
        "num_key_value_heads": 6,
        "head_dim": 20,
        "hidden_size": 78,
        "intermediate_size": 150,
    },
}
FORMATS = [("auto", "auto"), ("float32", "auto"), ("auto", "float32")]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("bits") / "model", **SHAPES[request.param])


@pytest.fixture(scope="module", params=FORMATS, ids=lambda pair: f"weights {pair[0]}, KV {pair[1]}")
def made(folder: Path, request: pytest.FixtureRequest) -> TorchRunner:
    dtype, kv_dtype = request.param
    return tiny_llama.runner(folder, dtype=dtype, kv_dtype=kv_dtype, blocks=400)


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(length)]


def blocks_for(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + -(-length // BLOCK)))


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunks(made: TorchRunner, chunk: int) -> None:
    tokens = text(201)
    whole = prefill(made, tokens, blocks_for(201))
    assert equal_bits(prefill(made, tokens, blocks_for(201, 50), chunk), whole)


def test_every_length_and_neighbourhood(made: TorchRunner) -> None:
    """Each prefix of a text, decoded as one row of a growing batch of others at other lengths."""
    length = 150
    tokens = text(length)
    blocks = blocks_for(length)
    alone = [logits_of(made, [piece(tokens, at, at + 1, blocks)])[0] for at in range(length)]
    draw = random.Random(5)
    for size in (2, 3, 5, 8, 13, 16, 33):
        places = [draw.randrange(length) for _ in range(size)]
        together = logits_of(made, [piece(tokens, at, at + 1, blocks, str(n)) for n, at in enumerate(places)])
        for row, at in zip(together, places, strict=True):
            assert equal_bits(row, alone[at]), f"position {at} in a batch of {size}"


def test_decodes_beside_chunks(made: TorchRunner) -> None:
    tokens, other = text(140), text(130, seed=1)
    expected = prefill(made, tokens, blocks_for(140))
    expected_other = prefill(made, other, blocks_for(130, 20))
    mixed: list[Slice] = [
        piece(other, 0, 130, blocks_for(130, 40), "b"),
        piece(tokens, 139, 140, blocks_for(140), "a"),
        piece(text(9, seed=2), 0, 9, blocks_for(9, 60), "c"),
    ]
    got = logits_of(made, mixed)
    assert equal_bits(got[1], expected)
    assert equal_bits(got[0], expected_other)


def test_prefix_hit_in_other_pages(made: TorchRunner) -> None:
    """Another sequence computed the prefix; this one shares its blocks, and its own lie anywhere."""
    tokens = text(200)
    cold = prefill(made, tokens, blocks_for(200))
    own = [390, 77, 311, 205, 399]
    shared = blocks_for(200)[:8]
    got = logits_of(made, [piece(tokens, 128, 200, shared + own)])[0]
    assert equal_bits(got, cold)


def test_what_an_earlier_owner_left_does_not_matter(made: TorchRunner) -> None:
    tokens = text(70)
    clean = prefill(made, tokens, blocks_for(70, 100))
    loud = text(80, seed=9)
    prefill(made, loud, blocks_for(80, 200))
    pages = made._kv  # the largest numbers a page can hold, in every place
    assert pages is not None
    pages.layers.view(pages.num_blocks, -1)[200:205] = 65_504.0
    assert equal_bits(prefill(made, tokens, blocks_for(70, 200)), clean)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads(made: TorchRunner, threads: int) -> None:
    tokens = text(300)
    torch.set_num_threads(1)
    chunk = prefill(made, tokens, blocks_for(300))
    row = logits_of(made, [piece(tokens, 299, 300, blocks_for(300))])[0]
    torch.set_num_threads(threads)
    assert equal_bits(prefill(made, tokens, blocks_for(300, 60)), chunk)
    assert equal_bits(logits_of(made, [piece(tokens, 299, 300, blocks_for(300))])[0], row)
    assert equal_bits(row, chunk)


def test_block_size_does_not_matter(folder: Path) -> None:
    tokens = text(170)
    results = [
        prefill(tiny_llama.runner(folder, block_size=size, blocks=30), tokens, list(range(-(-170 // size))))
        for size in (8, 16, 32, 64)
    ]
    assert all(equal_bits(one, results[0]) for one in results)
