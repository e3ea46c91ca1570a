"""Small random Llama models in Hugging Face folders, and a way to drive a runner by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def save(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random model in `folder`, as transformers would save it; `changes` go over `SIZES`.

    Norms are random too, so that each is seen.
    """
    config = {**SIZES, **changes}
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.setdefault("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": random_weight(shape, generator) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "silu", **config}))
    return folder


def random_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms (one dimension) lie in 0.5 to 1.5, the rest around 0."""
    if len(shape) == 1:
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) * 0.15


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
