"""What lm-evaluation-harness reads of `/v1/completions`, against transformers with the same weights."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import Figure
from running import Running

from baton.models.catalogue import ModelPath
from baton.models.pull import pull
from baton.text.model_files import load_tokenizer

DATA = Path(__file__).parents[1] / "data"
MODEL = "smollm2-135m-instruct"
HARNESS = "lm_eval[api]==0.4.13"
CLOSE = 1e-3  # a token
# Words of context, words whose likelihood is asked for: one row, around the 64 whose logits are made at once,
# several chunks.
SHAPES = [(1, 1), (3, 5), (40, 10), (60, 40), (300, 50), (700, 5)]

Oracle = Callable[[list[int], int], tuple[float, bool, float]]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model() -> ModelPath:
    return pull(MODEL)


@pytest.fixture(scope="module")
def baton(model: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--engine", "torch", "--dtype", "float32", "--prefill", "0", "--kv-memory-mb", "128")
    with Running(tmp_path_factory.mktemp("harness"), "--model", MODEL, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(model: ModelPath) -> Iterator[Oracle]:
    """tokens, length of the context -> log-likelihood of the rest, whether it is greedy, by which margin."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        model.path.parent, gguf_file=model.path.name, dtype=torch.float32
    )

    def ask(tokens: list[int], context: int) -> tuple[float, bool, float]:
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens])).logits[0, context - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(tokens[context:])
        chosen, best = logits.gather(-1, wanted[:, None])[:, 0], logits.max(-1).values
        greedy = bool((logits.argmax(-1) == wanted).all())
        return float(chosen.sum()), greedy, float((best - chosen).max())

    yield ask
    gc.collect()


@pytest.fixture(scope="module")
def pairs(model: ModelPath) -> list[tuple[str, str]]:
    """Contexts and what follows them, from natural text."""
    words = (DATA / "pride_and_prejudice.txt").read_text().split(" ")
    texts = []
    for number, (before, after) in enumerate(SHAPES):
        part = words[50 * number : 50 * number + before + after]
        texts.append((" ".join(part[:before]), " " + " ".join(part[before:])))
    return texts


def test_the_harness_requests(
    baton: Running, model: ModelPath, oracle: Oracle, pairs: list[tuple[str, str]], figure: Figure
) -> None:
    """As `LocalCompletionsAPI` of lm_eval 0.4.13 asks and reads: ids, one token more than is wanted."""
    tokenizer = load_tokenizer(model)
    contexts = [tokenizer.encode(context, special=False) for context, _ in pairs]
    prompts = [
        tokens + tokenizer.encode(rest, special=False)
        for tokens, (_, rest) in zip(contexts, pairs, strict=True)
    ]
    payload = {
        "model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    status, answer = baton.post("/v1/completions", payload, timeout=300)
    assert status == 200, answer
    worst = 0.0
    for choice, prompt, context in zip(answer["choices"], prompts, contexts, strict=True):
        length, logprobs = len(context), choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        told = logprobs["token_logprobs"][length:-1]
        greedy = all(
            value == max(top.values())
            for value, top in zip(told, logprobs["top_logprobs"][length:-1], strict=True)
        )
        likelihood, is_greedy, margin = oracle(prompt, length)
        each = abs(sum(told) - likelihood) / len(told)
        assert each < CLOSE, f"{len(told)} tokens after {length}"
        assert greedy == is_greedy or margin < CLOSE
        worst = max(worst, each)
    figure(f"prompt log-likelihoods against transformers: {worst:.1e} a token at most")


@pytest.mark.slow  # installs the harness
def test_the_harness_itself(
    baton: Running,
    model: ModelPath,
    oracle: Oracle,
    pairs: list[tuple[str, str]],
    tmp_path: Path,
    figure: Figure,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    docs = [{"context": context, "target": rest} for context, rest in pairs]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "likelihoods",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "likelihoods.yaml").write_text(json.dumps(task))
    arguments = f"model={MODEL},base_url={baton.url}/v1/completions,tokenizer={tmp_path / 'tokenizer'}"
    command = [
        harness(tmp_path / "venv"), "-m", "lm_eval", "--model", "local-completions",
        "--model_args", f"{arguments},tokenizer_backend=huggingface,num_concurrent=1,max_retries=1",
        "--tasks", "likelihoods", "--include_path", str(tmp_path / "tasks"), "--log_samples",
        "--output_path", str(tmp_path / "out"), "--batch_size", "2",
    ]  # fmt: skip
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3_000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    worst = 0.0
    lines = samples.read_text().splitlines()
    assert len(lines) == len(pairs)
    for line in lines:
        sample: dict[str, Any] = json.loads(line)
        context = tokenizer(sample["doc"]["context"])["input_ids"]
        rest = tokenizer(sample["doc"]["context"] + sample["doc"]["target"])["input_ids"]
        likelihood, _, _ = oracle(rest, len(context))
        each = abs(float(sample["resps"][0][0][0]) - likelihood) / (len(rest) - len(context))
        assert each < CLOSE
        worst = max(worst, each)
    figure(f"lm_eval local-completions against transformers: {worst:.1e} a token at most")


def harness(folder: Path) -> str:
    """A Python with the harness, beside what is installed here."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    (Path(own) / "beside.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([python, "-m", "pip", "install", "--quiet", HARNESS], check=True, stdout=sys.stderr)
    return python
