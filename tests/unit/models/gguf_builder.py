"""GGUF files byte by byte, so that tests can make wrong ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> tuple[int, bytes]:
    return U32, struct.pack("<I", value)


def f32(value: float) -> tuple[int, bytes]:
    return F32, struct.pack("<f", value)


def text(value: str | bytes) -> tuple[int, bytes]:
    return STRING, string(value)


def strings(values: list[str]) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(string, values))


def numbers(values: list[int], kind: int = 5, code: str = "i") -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", kind, len(values)) + struct.pack(f"<{len(values)}{code}", *values)


@dataclass
class Tensor:
    """`shape` fastest dimension first, as the file has it."""

    name: str
    shape: list[int]
    data: bytes
    type: int = 0
    offset: int | None = None


@dataclass
class Gguf:
    """A file in the making; `None` counts are those of the lists."""

    metadata: list[tuple[str, tuple[int, bytes]]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32

    def bytes(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        keys = len(self.metadata) if self.key_count is None else self.key_count
        out = self.magic + self.version + struct.pack("<QQ", tensors, keys)
        for key, (kind, value) in self.metadata:
            out += string(key) + struct.pack("<I", kind) + value
        body = b""
        for tensor in self.tensors:
            offset = len(body) if tensor.offset is None else tensor.offset
            out += string(tensor.name) + struct.pack("<I", len(tensor.shape))
            out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
            out += struct.pack("<IQ", tensor.type, offset)
            body += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return out + bytes(-len(out) % self.alignment) + body

    def write(self, folder: Path) -> Path:
        path = folder / "made.gguf"
        path.write_bytes(self.bytes())
        return path


def tiny_llama(*, vocab: int = 8, tied: bool = True) -> Gguf:
    """A Llama of one layer: hidden 4, two heads of 2, one KV head, feed-forward 6. All weights are zero."""
    hidden, keys, ffn = 4, 2, 6
    metadata = [
        ("general.architecture", text("llama")),
        ("llama.block_count", u32(1)),
        ("llama.context_length", u32(64)),
        ("llama.embedding_length", u32(hidden)),
        ("llama.feed_forward_length", u32(ffn)),
        ("llama.attention.head_count", u32(2)),
        ("llama.attention.head_count_kv", u32(1)),
        ("llama.attention.layer_norm_rms_epsilon", f32(1e-5)),
        ("tokenizer.ggml.tokens", strings([f"t{number}" for number in range(vocab)])),
        ("tokenizer.ggml.token_type", numbers([1] * vocab)),
        ("tokenizer.ggml.bos_token_id", u32(1)),
        ("tokenizer.ggml.eos_token_id", u32(2)),
    ]
    shapes = {
        "token_embd.weight": [hidden, vocab],
        "blk.0.attn_norm.weight": [hidden],
        "blk.0.attn_q.weight": [hidden, hidden],
        "blk.0.attn_k.weight": [hidden, keys],
        "blk.0.attn_v.weight": [hidden, keys],
        "blk.0.attn_output.weight": [hidden, hidden],
        "blk.0.ffn_norm.weight": [hidden],
        "blk.0.ffn_gate.weight": [hidden, ffn],
        "blk.0.ffn_up.weight": [hidden, ffn],
        "blk.0.ffn_down.weight": [ffn, hidden],
        "output_norm.weight": [hidden],
    }
    if not tied:
        shapes["output.weight"] = [hidden, vocab]
    return Gguf(metadata, [zeros(name, shape) for name, shape in shapes.items()])


def zeros(name: str, shape: list[int]) -> Tensor:
    values = 1
    for extent in shape:
        values *= extent
    return Tensor(name, shape, bytes(4 * values))
