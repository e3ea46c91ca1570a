"""A decoder's description out of GGUF metadata. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from baton.models.dequant import dequantise
from baton.models.description import DecoderConfig, checked
from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.gguf import GgufFile
from baton.models.rope import Rope, yarn_attention_factor

ARCHITECTURES = ("llama",)

# Said by some files, without effect on what the model computes.
_INFORMATIVE = {"rope.scaling.finetuned", "tensor_data_layout"}
_UNUSED_TOKEN = 5  # `tokenizer.ggml.token_type` of padding


def from_gguf(file: GgufFile) -> DecoderConfig:
    """Describe the decoder in a GGUF file, and check that exactly its tensors are there.

    Raises:
        ModelFileError: a key or tensor is missing, of the wrong kind or shape, or contradicts another.
        UnsupportedModel: a key or tensor asks for something that the decoder does not do; it is named.
    """
    source = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{source}: architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} is"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(f"{source}: is one part of a split model (split.count); merge the parts first")
    keys = _Keys(source, architecture, file.metadata)
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{source}: attention.value_length differs from attention.key_length")
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(
            f"{source}: partial rotary embedding ({rotated} of {head_dim} dimensions, rope.dimension_count)"
        )
    max_context = keys.integer("context_length")
    vocab_size = _vocab_size(file)
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        real_vocab=_real_vocab(file, vocab_size, keys.integer("vocab_size", vocab_size)),
        hidden=hidden,
        layers=keys.integer("block_count"),
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=keys.integer("feed_forward_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys, head_dim, max_context),
        max_context=max_context,
        tied_embeddings="output.weight" not in file.tensors,
        qk_interleaved=True,
        bos_id=_token(file, "bos"),
        eos_ids=tuple(
            dict.fromkeys(
                token for name in ("eos", "eot", "eom") if (token := _token(file, name)) is not None
            )
        ),
    )
    keys.refuse_unread()
    checked(config, source)
    _check_tensors(file, config)
    return config


class _Keys:
    """The metadata of one architecture. Remembers what was read, so that the rest can be refused."""

    def __init__(self, source: str, architecture: str, metadata: dict[str, Any]) -> None:
        self.source = source
        self.prefix = f"{architecture}."
        self.metadata = metadata
        self.read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; an array of equal ones (a value for each layer) counts as one."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedModel(f"{self.source}: {self.prefix}{key} differs between layers")
            value = int(value[0])
        if type(value) is not int:
            raise ModelFileError(f"{self.source}: {self.prefix}{key} is not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. GGUF has float32: the shortest decimal that means the same is what was meant."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelFileError(f"{self.source}: {self.prefix}{key} is not a finite number")
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if single == value else float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self.source}: {self.prefix}{key} is not a string")
        return value

    def has(self, key: str) -> bool:
        return f"{self.prefix}{key}" in self.metadata

    def refuse_unread(self) -> None:
        """Nothing that might change the result is passed over in silence."""
        for full, value in self.metadata.items():
            key = full.removeprefix(self.prefix)
            if key == full or key in self.read or key in _INFORMATIVE:
                continue
            # Zero or false turns a feature off; causal attention is the one that is on.
            neutral = value is True if key == "attention.causal" else _is_zero(value)
            if not neutral:
                raise UnsupportedModel(f"{self.source}: {full!r:.120} is not supported")

    def _get(self, key: str, default: Any) -> Any:
        self.read.add(key)
        value = self.metadata.get(f"{self.prefix}{key}", default)
        if value is None:
            raise ModelFileError(f"{self.source}: lacks the metadata key {self.prefix}{key}")
        return value


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{file.path}: lacks the tensor 'token_embd.weight'")
    return embedding.shape[0]


def _real_vocab(file: GgufFile, rows: int, claimed: int) -> int:
    """Tokens that exist. Padding is rows without a token, and tokens at the end marked as unused."""
    if claimed > rows:
        raise ModelFileError(f"{file.path}: vocab_size is {claimed}, the embedding has {rows} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return claimed
    types = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, np.ndarray) and types.shape == (len(tokens),):
        used = np.flatnonzero(types != _UNUSED_TOKEN)
        return int(used[-1]) + 1 if used.size else len(tokens)
    return len(tokens)


def _rope(file: GgufFile, keys: _Keys, head_dim: int, max_context: int) -> Rope:
    """RoPE as llama.cpp reads it: a factor without a type means linear."""
    theta = keys.number("rope.freq_base", 10_000.0)
    legacy = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", legacy) or 1.0
    kind = keys.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = keys.integer("rope.scaling.original_context_length", max_context)
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none" and factor != 1.0:
            raise UnsupportedModel(f"{keys.source}: rope_freqs.weight together with {kind!r:.80} scaling")
        info = file.tensors["rope_freqs.weight"]
        factors = dequantise(info.type, file.raw(info.name), info.shape).ravel()
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ModelFileError(f"{keys.source}: rope_freqs.weight holds factors that are not positive")
        return Rope(dimensions=head_dim, theta=theta, kind="factors", factors=tuple(factors.tolist()))
    if kind == "yarn":
        return Rope(
            dimensions=head_dim,
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=original,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor * yarn_attention_factor(factor),
        )
    if attention_factor != 1.0:
        raise UnsupportedModel(f"{keys.source}: {keys.prefix}rope.scaling.attn_factor without YaRN")
    if kind == "linear":
        return Rope(dimensions=head_dim, theta=theta, kind="linear", factor=factor)
    if kind == "none":
        return Rope(dimensions=head_dim, theta=theta)
    raise UnsupportedModel(f"{keys.source}: RoPE scaling {kind!r:.80} is not supported")


def _token(file: GgufFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int else None


def _check_tensors(file: GgufFile, config: DecoderConfig) -> None:
    """The file holds this decoder's tensors in their shapes, and no others."""
    layer, outside = _tensor_shapes(config)
    if config.layers * len(layer) > len(file.tensors):
        raise ModelFileError(f"{file.path}: lacks tensors for its {config.layers} layers")
    expected = dict(outside)
    for number in range(config.layers):
        expected.update({f"blk.{number}.{name}": shape for name, shape in layer.items()})
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{file.path}: lacks the tensor {name!r}")
        if info.shape != shape:
            raise ModelFileError(
                f"{file.path}: tensor {name!r} has shape {list(info.shape)}, not {list(shape)}"
            )
    for name in file.tensors:
        if name not in expected:
            raise UnsupportedModel(f"{file.path}: tensor {name!r:.120} is not part of a supported decoder")


def _tensor_shapes(
    config: DecoderConfig,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of one layer's tensors, and of those outside the layers."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (config.ffn, hidden),
        "ffn_up.weight": (config.ffn, hidden),
        "ffn_down.weight": (hidden, config.ffn),
    }
    outside: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        outside["output.weight"] = (config.vocab_size, hidden)
    if config.rope.kind == "factors":
        outside["rope_freqs.weight"] = (config.head_dim // 2,)
    return layer, outside
