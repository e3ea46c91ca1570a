"""Weights as a file holds them -> the native kernels' panels, exactly wherever there is a form for it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from baton.models.dequant import dequantise
from baton.models.errors import UnsupportedModel
from baton.models.ggml_types import GgmlType
from baton_kernels.cpu.packing import (
    GROUP,
    Kind,
    PackedMatrix,
    pack_eight,
    pack_four,
    pack_q4_0,
    pack_q4_1,
    pack_q8_0,
    quantise,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_KINDS = {
    GgmlType.Q4_0: Kind.Q4_HALF,
    GgmlType.Q4_1: Kind.Q4_HALF,
    GgmlType.Q4_K: Kind.Q4_FULL,
    GgmlType.Q5_1: Kind.Q8_FULL,
    GgmlType.Q5_K: Kind.Q8_FULL,
}
_ONE = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
# The 6-bit scales of a K block all 1, its minima all 0, in their packed form.
_K_SCALES_ONE = np.array([1] * 4 + [0] * 4 + [1] * 4, dtype=np.uint8)


def kind_of(kind: GgmlType) -> Kind:
    """How a tensor of this type is packed. Q5_0 and Q8_0 exactly; what is not named above as 8 bit."""
    return _KINDS.get(kind, Kind.Q8_HALF)


def pack_blocks(kind: GgmlType, raw: Bytes, rows: int, columns: int, name: str) -> PackedMatrix:
    """Some rows of a matrix.

    Args:
        raw: uint8, the rows' bytes as they lie in the file.
        name: of the tensor, for errors.

    Raises:
        UnsupportedModel: it does not fit the formats here.
    """
    raw = np.ascontiguousarray(raw).reshape(-1)
    try:
        match kind:
            case GgmlType.Q4_0:
                return pack_q4_0(raw, rows)
            case GgmlType.Q4_1:
                return pack_q4_1(raw, rows)
            case GgmlType.Q8_0:
                return pack_q8_0(raw, rows)
            case GgmlType.Q5_0:
                codes = _codes(kind, _with_scale_one(kind, raw), rows, columns)
                scales = np.ascontiguousarray(raw.reshape(-1, kind.block_bytes)[:, :2]).view("<f2")
                return pack_eight((codes + 128).astype(np.uint8), scales.reshape(rows, -1), None)
            case GgmlType.Q5_1 | GgmlType.Q4_K | GgmlType.Q5_K:
                return _pack_affine(kind, raw, rows, columns)
        return quantise(dequantise(kind, raw, (rows, columns)))
    except ValueError as error:
        raise _too_large(name, error) from error


def pack_floats(weight: Floats, name: str) -> PackedMatrix:
    """Some rows of a matrix, float32 [rows, columns], as 8 bit in groups of 32.

    Raises:
        UnsupportedModel: as `pack_blocks`.
    """
    try:
        return quantise(weight)
    except ValueError as error:
        raise _too_large(name, error) from error


def _too_large(name: str, error: ValueError) -> UnsupportedModel:
    return UnsupportedModel(f"tensor {name!r} has {error}: use --engine torch --model-dtype float32")


def _pack_affine(kind: GgmlType, raw: Bytes, rows: int, columns: int) -> PackedMatrix:
    """w = d * q + m by groups of 32, with d and m as the file's reference computes them.

    The three are read by the reference itself out of altered copies: with scales 1 and minima 0 it gives the
    codes, with codes 0 the minima, with codes 1 and minima 0 the scales.
    """
    codes = _codes(kind, _with_scale_one(kind, raw), rows, columns)
    minima = _firsts(kind, _with_codes(kind, raw, 0), rows, columns)
    no_minima = _with_codes(kind, raw, 1)
    no_minima.reshape(-1, kind.block_bytes)[:, 2:4] = 0
    scales = _firsts(kind, no_minima, rows, columns)
    if kind == GgmlType.Q4_K:
        return pack_four(codes.astype(np.uint8), scales, minima)
    return pack_eight((codes + 128).astype(np.uint8), scales, minima)


def _codes(kind: GgmlType, raw: Bytes, rows: int, columns: int) -> Floats:
    """float32 [rows, groups, 32], whole numbers."""
    return dequantise(kind, raw, (rows, columns)).reshape(rows, -1, GROUP)


def _firsts(kind: GgmlType, raw: Bytes, rows: int, columns: int) -> Floats:
    """The first value of each group, float32 [rows, groups]."""
    return np.ascontiguousarray(_codes(kind, raw, rows, columns)[:, :, 0])


def _with_scale_one(kind: GgmlType, raw: Bytes) -> Bytes:
    """A copy with all scales 1 and all minima 0."""
    blocks = raw.reshape(-1, kind.block_bytes).copy()
    blocks[:, :2] = _ONE
    if kind != GgmlType.Q5_0:
        blocks[:, 2:4] = 0
    if kind in (GgmlType.Q4_K, GgmlType.Q5_K):
        blocks[:, 4:16] = _K_SCALES_ONE
    return blocks.reshape(-1)


def _with_codes(kind: GgmlType, raw: Bytes, code: int) -> Bytes:
    """A copy with all codes 0 or 1."""
    blocks = raw.reshape(-1, kind.block_bytes).copy()
    # Where fifth bits and nibbles begin: after d and m; K blocks have 12 bytes of scales there as well.
    fifth, nibbles = {GgmlType.Q5_1: (4, 8), GgmlType.Q4_K: (16, 16), GgmlType.Q5_K: (16, 48)}[kind]
    blocks[:, fifth:nibbles] = 0
    blocks[:, nibbles:] = code * 0x11
    return blocks.reshape(-1)


def matrix_bytes(kind: Kind, rows: int, columns: int) -> int:
    """Size of a packed matrix."""
    return math.ceil(rows / 8) * math.ceil(columns / GROUP) * kind.tile_bytes
