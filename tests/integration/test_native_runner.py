"""The default model on the native kernels: true to float32, the same bits everywhere, without torch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import native_llama
import numpy as np
import numpy.typing as npt
import pytest
import torch
from figures import Figure
from native_llama import equal_bits, logits_of, piece, prefill

from baton.engine.plan import SampleSpec, Slice, StepPlan
from baton.kvcache.fingerprint import weights_hash
from baton.models.catalogue import default_cache_dir
from baton.models.config import load_config
from baton.models.decoder import Decoder, PagedKv
from baton.models.pull import pull
from baton.models.weights import load_weights
from baton.protocol.sampling import SamplingParams
from baton.runner import native_weights
from baton.runner.native_runner import NativeRunner
from baton.runner.native_weights import load_packed
from baton.text.model_files import load_tokenizer
from baton_kernels.attention_plan import Span

MODEL = "smollm2-135m-instruct"
DATA = Path(__file__).parents[1] / "data"
LENGTH = 211
WINDOW = 256
PERPLEXITY_TOKENS = 768
QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return load_tokenizer(pull(MODEL)).encode((DATA / "harbour.txt").read_text(), special=False)


@pytest.fixture(scope="module")
def runner() -> Iterator[NativeRunner]:
    pull(MODEL)
    made = native_llama.runner(MODEL, blocks=400, threads=2)
    yield made
    made.close()


def all_logits(made: NativeRunner, tokens: list[int], start: int) -> npt.NDArray[np.float32]:
    """Logits of every token of a chunk, float32 [tokens, vocab]."""
    assert made._pool is not None
    part = piece(tokens, start, len(tokens), list(range(100)))
    step, _ = made._arrays.lay_out([part], [0], made._pool)
    rows = np.arange(len(part.tokens), dtype=np.int32)
    out = np.empty((len(rows), step.logits_stride), dtype=np.float32)
    step.sampled, step.sampled_rows, step.logits = len(rows), rows.ctypes.data, out.ctypes.data
    made._executor.step(step)
    return out


def loss(logits: npt.NDArray[np.float32], targets: list[int]) -> float:
    """Sum of negative log-likelihoods."""
    return float(
        torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.tensor(targets), reduction="sum")
    )


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Torch's threads spin while they wait, and would take the cores from the kernels that are tested."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_perplexity_is_within_half_a_percent_of_float32(
    runner: NativeRunner, text: list[int], one_torch_thread: None, figure: Figure
) -> None:
    path = pull(MODEL).path
    config = load_config(path)
    tokens = text[: PERPLEXITY_TOKENS + 1]
    ours = theirs = 0.0
    with torch.inference_mode():
        decoder = Decoder(config, load_weights(path, config), half=False)
        page = decoder.page(16)
        blocks = list(range(WINDOW // 16))
        for begin in range(0, PERPLEXITY_TOKENS, WINDOW):
            window = tokens[begin : begin + WINDOW]
            targets = tokens[begin + 1 : begin + 1 + len(window)]
            ours += loss(all_logits(runner, window, 0)[: len(targets)], targets)
            kv = PagedKv(torch.zeros(len(blocks) * math.prod(page)), page)
            batch = decoder.batch(window, [Span(0, len(window), 0, blocks)], list(range(len(targets))), page)
            theirs += loss(decoder.forward(batch, kv).numpy(), targets)
    exact, native = math.exp(theirs / PERPLEXITY_TOKENS), math.exp(ours / PERPLEXITY_TOKENS)
    figure(f"perplexity: float32 {exact:.4f}, native {native:.4f} ({native / exact - 1:+.4%})")
    assert abs(native / exact - 1) < 0.005


def test_same_bits_everywhere(runner: NativeRunner, text: list[int]) -> None:
    tokens, blocks = text[:LENGTH], list(range(20))
    expected = prefill(runner, tokens, blocks)
    for chunk in (16, 100):
        assert equal_bits(prefill(runner, tokens, blocks, chunk), expected)
    single = native_llama.runner(MODEL, blocks=60, threads=1)
    assert equal_bits(prefill(single, tokens, list(range(59, 30, -1))), expected)
    single.close()
    # As one of sixteen decodes, and beside a chunk.
    tables = [list(range(20 + 15 * i, 35 + 15 * i)) for i in range(15)]
    others = [text[300 + 7 * i : 300 + 7 * i + 20 + 11 * i] for i in range(15)]
    logits_of(runner, [piece(others[i], 0, len(others[i]) - 1, tables[i], str(i)) for i in range(15)])
    ends = [len(other) for other in others]
    decodes = [piece(others[i], ends[i] - 1, ends[i], tables[i], str(i)) for i in range(15)]
    mine = piece(tokens, LENGTH - 1, LENGTH, blocks)
    assert equal_bits(logits_of(runner, [*decodes[:9], mine, *decodes[9:]])[9], expected)
    chunk = piece(others[14], 0, 100, tables[14])
    assert equal_bits(logits_of(runner, [chunk, mine, decodes[0]])[1], expected)


def test_a_long_context_has_the_same_bits_as_chunks_and_as_decodes(
    runner: NativeRunner, text: list[int]
) -> None:
    tokens = text[:1_100]
    expected = prefill(runner, tokens, list(range(70)), 256)
    prefill(runner, tokens[:1_090], list(range(100, 170)))
    assert equal_bits(prefill_from(runner, tokens, 1_090, list(range(100, 170))), expected)


def prefill_from(
    made: NativeRunner, tokens: list[int], start: int, blocks: list[int]
) -> npt.NDArray[np.float32]:
    """Token by token."""
    for position in range(start, len(tokens)):
        logits = logits_of(made, [piece(tokens, position, position + 1, blocks)])
    return logits[0]


def test_it_knows_the_capital_of_france(runner: NativeRunner) -> None:
    tokenizer = load_tokenizer(pull(MODEL))
    tokens = tokenizer.encode(QUESTION, special=True)
    prompt, start = len(tokens), 0
    while len(tokens) < prompt + 8:
        spec = SampleSpec(SamplingParams(temperature=0), 0, len(tokens) - prompt, tokens, prompt)
        plan = StepPlan(1, [Slice(("a", 0, 0), tokens[start:], start, list(range(10)), spec)])
        (sampled,) = runner.execute(plan).samples
        assert sampled is not None
        start = len(tokens)
        tokens.append(sampled.token)
    answer = b"".join(tokenizer.token_bytes(token) for token in tokens[prompt:]).decode()
    assert "Paris" in answer


def test_weights_are_packed_once_and_mapped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = pull(MODEL).path
    config = load_config(path)
    weights = weights_hash(path, default_cache_dir())
    caplog.set_level("INFO", logger=native_weights.__name__)
    first = load_packed(path, config, weights, tmp_path)
    assert "weights packed" in caplog.text
    (kept,) = (tmp_path / "packed").glob("*.panels")
    before = kept.stat()
    caplog.clear()
    second = load_packed(path, config, weights, tmp_path)
    assert kept.stat() == before
    assert not caplog.text
    assert bytes(first._memory) == bytes(second._memory)
    with kept.open("r+b") as file:
        file.truncate(before.st_size // 2)
    third = load_packed(path, config, weights, tmp_path)
    assert "packed anew" in caplog.text
    assert third.nbytes == first.nbytes


def test_no_torch_on_the_path() -> None:
    code = (
        "import sys\n"
        "from baton.config.load import load\n"
        "from baton.runner.create import create\n"
        f"environ = {{'BATON_WORKER_ENGINE': 'native', 'BATON_MODEL_NAME': '{MODEL}'}}\n"
        "runner = create(load(None, environ, {}))\n"
        "runner.warm_up()\n"
        "runner.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
