"""The default model against transformers, with the same weights out of the same file."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from figures import Figure

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import Sampled, SampleSpec, Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.models.catalogue import ModelPath
from baton.models.config import load_config
from baton.models.decoder import Decoder, PagedKv
from baton.models.pull import pull
from baton.models.weights import load_weights
from baton.protocol.sampling import SamplingParams
from baton.runner.torch_runner import TorchRunner
from baton.text.model_files import load_tokenizer
from baton_kernels.attention_plan import Span

DATA = Path(__file__).parents[1] / "data"
MODEL = "smollm2-135m-instruct"
LENGTHS = [5, 9, 15, 16, 17, 31, 32, 48, 64, 65, 100, 127, 128, 200, 257, 333, 450, 640, 1_000, 1_500]
OUTPUT = 48  # tokens
CLOSE = 1e-3  # two logits nearer than this may change places
BLOCK = 16
CHUNK = 256
WINDOW = 1_024
PERPLEXITY_TOKENS = 8_000

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model() -> ModelPath:
    return pull(MODEL)


@pytest.fixture(scope="module")
def text(model: ModelPath) -> list[int]:
    """The natural texts of tests/data, one after the other."""
    files = sorted(DATA.glob("*.txt"))
    return load_tokenizer(model).encode("\n\n".join(file.read_text() for file in files), special=False)


@pytest.fixture(scope="module", autouse=True)
def release() -> Iterator[None]:
    yield
    gc.collect()


def prompts(text: list[int]) -> list[list[int]]:
    """A prompt of each length, from places spread over the text."""
    step = (len(text) - max(LENGTHS)) // len(LENGTHS)
    return [text[number * step : number * step + length] for number, length in enumerate(LENGTHS)]


def greedy(runner: TorchRunner, given: list[list[int]]) -> tuple[list[list[int]], list[float]]:
    """Prompt and output of each, and the log-probability of each first token.

    Prompts in chunks one after the other, then all decode together.
    """
    known = [list(prompt) for prompt in given]
    each = -(-(max(LENGTHS) + OUTPUT) // BLOCK)
    blocks = [list(range(number * each, (number + 1) * each)) for number in range(len(given))]
    runner.attach(KvPool.create_private(runner.geometry, each * len(given)))

    def run(slices: list[Slice]) -> list[Sampled]:
        return [s for s in runner.execute(StepPlan(1, slices)).samples if s is not None]

    def part(number: int, start: int, end: int) -> Slice:
        tokens = known[number]
        spec = SampleSpec(
            SamplingParams(logprobs=0), 0, len(tokens) - LENGTHS[number], tokens, LENGTHS[number]
        )
        return Slice(
            (str(number), 0, 0),
            tokens[start:end],
            start,
            blocks[number],
            spec if end == len(tokens) else None,
        )

    first = []
    for number, prompt in enumerate(given):
        for start in range(0, len(prompt), CHUNK):
            sampled = run([part(number, start, min(start + CHUNK, len(prompt)))])
        assert sampled[0].logprobs is not None
        first.append(sampled[0].logprobs.chosen)
        known[number].append(sampled[0].token)
    for _ in range(OUTPUT - 1):
        step = run([part(number, len(known[number]) - 1, len(known[number])) for number in range(len(given))])
        for tokens, sampled_one in zip(known, step, strict=True):
            tokens.append(sampled_one.token)
    return known, first


def test_greedy_tokens_equal_transformers(model: ModelPath, text: list[int], figure: Figure) -> None:
    """transformers reads prompt and our output at once: each output token must be its own greedy choice.

    That is what comparing two greedy runs would find, up to the first token where they may differ.
    """
    from transformers import AutoModelForCausalLM

    settings = Settings(
        model=ModelSettings(name=MODEL, dtype="float32", block_size=BLOCK), worker=WorkerSettings()
    )
    runner = TorchRunner(settings)
    known, first = greedy(runner, prompts(text))
    runner.close()
    theirs = AutoModelForCausalLM.from_pretrained(
        model.path.parent, gguf_file=model.path.name, dtype=torch.float32
    )
    branches = []
    for tokens, length, logprob in zip(known, LENGTHS, first, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens[:-1]]), logits_to_keep=OUTPUT).logits[0]
        ours = torch.tensor(tokens[length:])
        assert abs(float(logits[0].log_softmax(-1)[ours[0]]) - logprob) < CLOSE
        best, chosen = logits.max(-1).values, logits.gather(-1, ours[:, None])[:, 0]
        differ = (logits.argmax(-1) != ours).nonzero()[:, 0].tolist()
        if differ:
            at = differ[0]
            margin = float(best[at] - chosen[at])
            assert margin < CLOSE, f"prompt of {length}: token {at} is {margin} below the best"
            branches.append(f"prompt of {length}: branches at token {at}, logits {margin:.1e} apart")
    for branch in branches:
        figure(branch)
    figure(
        f"greedy against transformers: {len(known) - len(branches)} of {len(known)} prompts without a branch"
    )


def perplexity(model: ModelPath, tokens: list[int], *, half: bool) -> float:
    """Over windows of `WINDOW` tokens, each from its own second token on."""
    config = load_config(model.path)
    total, count = 0.0, 0
    with torch.inference_mode():
        decoder = Decoder(config, load_weights(model.path, config), half=half, threads=2)
        page = decoder.page(BLOCK)
        blocks = list(range(WINDOW // BLOCK))
        dtype = torch.float16 if half else torch.float32
        kv = PagedKv(torch.zeros(len(blocks) * math.prod(page), dtype=dtype), page)
        for begin in range(0, len(tokens), WINDOW):
            window = tokens[begin : begin + WINDOW]
            for start in range(0, len(window), CHUNK):
                ids = window[start : start + CHUNK]
                targets = torch.tensor(window[start + 1 : start + 1 + len(ids)])
                batch = decoder.batch(
                    ids, [Span(0, len(ids), start, blocks)], list(range(len(targets))), page
                )
                logits = decoder.forward(batch, kv)
                total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
                count += len(targets)
    return math.exp(total / count)


@pytest.mark.slow  # about a minute; the default engine has its own in test_native_runner
def test_default_dtype_keeps_the_perplexity(model: ModelPath, text: list[int], figure: Figure) -> None:
    tokens = text[:PERPLEXITY_TOKENS]
    assert len(tokens) == PERPLEXITY_TOKENS
    exact = perplexity(model, tokens, half=False)
    half = perplexity(model, tokens, half=True)
    figure(f"perplexity: float32 {exact:.4f}, float16 {half:.4f} ({half / exact - 1:+.4%})")
    assert abs(half / exact - 1) < 0.005
