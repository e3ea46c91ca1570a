"""ggml's block formats to float32, in numpy.

Bitwise what ggml's reference (`ggml-quants.c`, and the `gguf` package) gives: each value is a product, or a
product and a sum, rounded to float32 after each operation, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.models.errors import ModelFileError
from baton.models.ggml_types import GgmlType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# Values worked on at once: the temporaries stay in the second-level cache.
_CHUNK_VALUES = 1 << 17


def dequantise(kind: GgmlType, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """A tensor's values.

    Args:
        kind: the tensor's type.
        raw: its bytes as they lie in the file, uint8 [nbytes].
        shape: row-major, rows a whole number of blocks.

    Returns:
        float32 [*shape], contiguous, a new array.

    Raises:
        ModelFileError: the bytes do not fill the shape.
    """
    values = math.prod(shape)
    if values % kind.block_values or raw.size != values // kind.block_values * kind.block_bytes:
        raise ModelFileError(f"{raw.size} bytes of {kind.name} do not make a tensor of shape {list(shape)}")
    raw = np.ascontiguousarray(raw)
    plain = _PLAIN.get(kind)
    if plain is not None:
        return plain(raw).reshape(shape)
    unpack = _BLOCKS[kind]
    blocks = raw.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_values), dtype=np.float32)
    step = _CHUNK_VALUES // kind.block_values
    # An infinite scale in a damaged file gives infinities and NaNs, as in the reference; no warning on top.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def bfloat16_to_float32(raw: Bytes) -> Floats:
    """bfloat16 is the upper half of a float32. uint8 [2 n] -> float32 [n]."""
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f32(raw: Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


# Each of these reads blocks, uint8 [n, block_bytes], and fills out, float32 [n, block_values].


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out, dtype=np.float32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out.reshape(-1, 1, 2, 16))
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out.reshape(-1, 1, 2, 16))
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= np.float32(16)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 16:], out.reshape(-1, 4, 2, 32))
    _scale_k(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    groups = out.reshape(-1, 8, 32)
    _nibbles(blocks[:, 48:], groups.reshape(-1, 4, 2, 32))
    high = blocks[:, 16:48]
    for bit in range(8):
        groups[:, bit] += _bit(high, bit)
    _scale_k(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    # Halves of 128 values; in each, four groups of 32 that take their upper two bits from the same bytes.
    groups = out.reshape(-1, 2, 4, 32)
    for group in range(4):
        packed = low[:, :, 32 * (group % 2) : 32 * (group % 2) + 32]
        nibbles = packed & 15 if group < 2 else packed >> 4
        groups[:, :, group] = nibbles | ((high >> (2 * group) & 3) << 4)
    out -= np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    by_scale = out.reshape(-1, 16, 16)
    by_scale *= scales[:, :, None]


def _scale_k(blocks: Bytes, out: Floats) -> None:
    """Apply the scales and minima of Q4_K and Q5_K: eight of 6 bits each, packed in bytes 4 to 15."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | (low >> 2 & 48)], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | (middle >> 2 & 48)], axis=1)
    groups = out.reshape(-1, 8, 32)
    groups *= (scales.astype(np.float32) * _half(blocks, 0))[:, :, None]
    groups -= (minima.astype(np.float32) * _half(blocks, 2))[:, :, None]


def _five_bits(high: Bytes, low: Bytes, out: Floats) -> None:
    """Values of 32 fifth bits (a little-endian word) and 32 nibbles."""
    _nibbles(low, out.reshape(-1, 1, 2, 16))
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    out += bits << 4


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Split bytes [n, groups * width] into out [n, groups, 2, width]: low nibbles, then high ones."""
    packed = packed.reshape(len(packed), out.shape[1], out.shape[3])
    out[:, :, 0] = packed & 15
    out[:, :, 1] = packed >> 4


def _bit(packed: Bytes, bit: int) -> Bytes:
    """One bit of each byte, worth 16."""
    return (packed >> np.uint8(bit) & np.uint8(1)) << np.uint8(4)


def _half(blocks: Bytes, offset: int) -> Floats:
    """A float16 of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


_PLAIN: dict[GgmlType, Callable[[Bytes], Floats]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _f16,
    GgmlType.BF16: bfloat16_to_float32,
}
_BLOCKS: dict[GgmlType, Callable[[Bytes, Floats], None]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
