"""Small random Llama models, saved as Hugging Face folders, and a way to drive a runner by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.engine.plan import Slice, StepPlan
from baton.kvcache.pool import KvPool
from baton.runner.torch_runner import TorchRunner

SIZES: dict[str, Any] = {
    "vocab_size": 515,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def save(folder: Path, *, seed: int = 0, shard: str = "5GB", **changes: Any) -> Path:
    """A random model in `folder`; `changes` go over `SIZES`. Norms are random too, so that each is seen."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.rand(weight.shape) + 0.5 if "norm" in name else torch.randn(weight.shape) * 0.15)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def runner(
    name: str | Path, *, dtype: str = "auto", blocks: int = 256, threads: int = 1, **model: Any
) -> TorchRunner:
    """A runner with a private pool of `blocks` blocks attached."""
    settings = Settings(
        model=ModelSettings(name=str(name), dtype=dtype, **model), worker=WorkerSettings(threads=threads)
    )
    made = TorchRunner(settings)
    made.attach(KvPool.create_private(made.geometry, blocks))
    return made


def piece(tokens: Sequence[int], start: int, end: int, blocks: list[int], name: str = "a") -> Slice:
    """Tokens `start` to `end` of a sequence whose first `start` are computed."""
    return Slice((name, 0, 0), list(tokens[start:end]), start, blocks, None)


def logits_of(made: TorchRunner, slices: list[Slice]) -> torch.Tensor:
    """One step: float32 [slices, vocab rows], of each slice's last token."""
    return made.logits(StepPlan(1, slices)).clone()


def prefill(made: TorchRunner, tokens: Sequence[int], blocks: list[int], chunk: int = 0) -> torch.Tensor:
    """Logits of the last token, computed in chunks of `chunk` tokens; 0: in one."""
    chunk = chunk or len(tokens)
    result = torch.empty(0)
    for start in range(0, len(tokens), chunk):
        result = logits_of(made, [piece(tokens, start, min(start + chunk, len(tokens)), blocks)])
    return result[0]
