"""The engine on a random model of Llama 3 8B's shape: a step's time, and a hand-off over CUDA IPC.

Prefill and decode are two processes; the second maps the first one's staging buffer by its IPC handle and
pulls the prompt's blocks out of it: one gather, one copy, one scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing as processes
from gpu_cases import Machine, Row, Sizes, microseconds
from torch import Tensor

from baton.engine.plan import Slice
from baton.models.description import DecoderConfig
from baton.models.rope import Rope
from baton.models.weights import weight_shape
from baton.runner.triton_decoder import TritonDecoder
from baton.runner.triton_steps import Steps
from baton.runner.triton_tuning import Tuning
from baton.runner.triton_weights import load_on_device
from baton_kernels.gpu.kv_move import gather_blocks, scatter_blocks
from baton_kernels.gpu.pages import Pages, PageShape

BLOCK = 16
WANTED = 1.0 / 1.35  # of the roofline


class RandomWeights:
    """Any tensor that is asked for, drawn on the spot, the same for the same name."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self._config = config
        self._device = device

    def tensor(self, name: str) -> Tensor:
        shape = weight_shape(self._config, name.rpartition(".")[2])
        generator = torch.Generator(self._device).manual_seed(sum(name.encode()))
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, generator=generator, device=self._device) * shape[1] ** -0.5


class Engine:
    """A decoder with a pool of `blocks` blocks."""

    def __init__(self, sizes: Sizes, device: torch.device, tuning: Tuning, blocks: int) -> None:
        self.config = config_of(sizes)
        shape = PageShape(sizes.layers, sizes.kv_heads, BLOCK, sizes.head_dim, sizes.format)
        raw = torch.zeros(blocks, shape.block_bytes, dtype=torch.uint8, device=device)
        self.pages = Pages(raw, shape)
        with torch.inference_mode():
            weights = load_on_device(
                self.config,
                RandomWeights(self.config, device),
                device,
                sizes.dtype,
                "plain",
                tuning.choose,
            )
            self.weight_bytes = (
                sum(
                    product.weight.nbytes
                    for layer in weights.layers
                    for product in (layer.qkv, layer.o, layer.gate_up, layer.down)
                )
                + weights.head.weight.nbytes
            )
            decoder = TritonDecoder(self.config, weights)
            self.steps = Steps(decoder, self.pages, device, sizes.dtype, rows=sizes.chunk)

    def prefill(self, tokens: list[int], blocks: list[int], chunk: int) -> Tensor:
        """Logits of the last token."""
        logits = torch.empty(0)
        with torch.inference_mode():
            for at in range(0, len(tokens), chunk):
                part = Slice(("a", 0, 0), tokens[at : at + chunk], at, blocks, None)
                logits = self.steps.run([part], [0])
        return logits[0].clone()

    def decode(self, tokens: list[int], start: int, tables: list[list[int]]) -> Tensor:
        """A step of single tokens, all at position `start`: logits [sequences, vocab]."""
        parts = [
            Slice((str(row), 0, 0), [token], start, blocks, None)
            for row, (token, blocks) in enumerate(zip(tokens, tables, strict=True))
        ]
        with torch.inference_mode():
            return self.steps.run(parts, range(len(parts)))


def config_of(sizes: Sizes) -> DecoderConfig:
    return DecoderConfig(
        architecture="llama", vocab_size=sizes.vocab, real_vocab=sizes.vocab, hidden=sizes.hidden,
        layers=sizes.layers, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
        ffn=sizes.ffn, rms_eps=1e-5, rope=Rope(dimensions=sizes.head_dim, theta=500_000.0),
        max_context=sizes.context, tied_embeddings=False,
    )  # fmt: skip


def decode_steps(machine: Machine, sizes: Sizes, tuning: Tuning) -> Iterator[Row]:
    """Steps of one and of 64 sequences at a quarter of the context, against what must be read for them."""
    start = sizes.context // 4
    each = start // BLOCK + 1
    most = 2 * sizes.batch
    engine = Engine(sizes, machine.device, tuning, most * each)
    for sequences in (1, most):
        tables = [list(range(row * each, (row + 1) * each)) for row in range(sequences)]
        tokens = [row % sizes.vocab for row in range(sequences)]
        took = microseconds(machine.device, lambda: engine.decode(tokens, start, tables))  # noqa: B023
        cached = sequences * start * sizes.layers * 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
        # A copy moves each byte twice, a step reads it once: the same bandwidth.
        least = (engine.weight_bytes + cached) / machine.bytes_per_s * 1e6
        yield Row(f"a step of {sequences} decodes at {start}", took, least / took, "roofline", WANTED)


def handoff(machine: Machine, sizes: Sizes, tuning: Tuning) -> Iterator[Row]:
    """A prompt prefilled in one process and written on in another: the same tokens as in one alone."""
    tokens = [(7 * n) % sizes.vocab for n in range(sizes.chunk)]
    count = -(-(len(tokens) + 8) // BLOCK)
    context = processes.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_prefill_process, args=(theirs, sizes, tokens, count))
    child.start()
    try:
        engine = Engine(sizes, machine.device, tuning, 2 * count)
        mine, pulled = list(range(count)), list(range(count, 2 * count))
        first = int(engine.prefill(tokens, mine, sizes.chunk).argmax())
        staging, their_first = ours.recv()  # by its CUDA IPC handle, where there is CUDA
        assert their_first == first, "the two processes begin with different tokens"
        into = torch.empty_like(staging, device=machine.device)
        slots = torch.tensor(pulled, dtype=torch.int32, device=machine.device)

        def pull() -> None:
            into.copy_(staging)
            scatter_blocks(engine.pages, slots, into)

        took = microseconds(machine.device, pull)
        alone, handed = (_written(engine, first, len(tokens), blocks) for blocks in (mine, pulled))
        assert alone == handed, "blocks handed over give other tokens"
        # A copy, then a scatter: four times each byte.
        share = 4 * staging.nbytes / took * 1e6 / machine.bytes_per_s
        yield Row(f"pull of {count} blocks over CUDA IPC", took, share, "copy bandwidth", 0.70)
        ours.send("done")
    finally:
        child.join(20)
        if child.is_alive():
            child.terminate()


def _written(engine: Engine, first: int, start: int, blocks: list[int]) -> list[int]:
    """Eight tokens after a prompt whose K and V lie in `blocks`."""
    tokens = [first]
    for at in range(7):
        tokens.append(int(engine.decode(tokens[-1:], start + at, [blocks])[0].argmax()))
    return tokens


def _prefill_process(pipe: Any, sizes: Sizes, tokens: list[int], count: int) -> None:
    """The other process: computes the prompt, gathers its blocks, and keeps them until told."""
    import tempfile
    from pathlib import Path

    from baton.runner.triton_device import open_device

    device = open_device()
    engine = Engine(sizes, device, Tuning(device, Path(tempfile.gettempdir()) / "baton-bench"), count)
    first = int(engine.prefill(tokens, list(range(count)), sizes.chunk).argmax())
    staging = torch.empty(count, engine.pages.shape.block_bytes, dtype=torch.uint8, device=device)
    gather_blocks(engine.pages, torch.arange(count, dtype=torch.int32, device=device), staging)
    if device.type == "cuda":
        torch.cuda.synchronize()
    pipe.send((staging, first))
    pipe.recv()
