"""Weights into the kernels' panels: 8 output rows by tiles of 32 along K. `tiles.h` has the layout.

A file's own blocks are kept exactly, in another order. What has no exact form here becomes 8 bit in groups
of 32, each with its own scale, as ggml's Q8_0 does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LANES = 8
GROUP = 32


class Kind(enum.IntEnum):
    """How a tile is laid out: bits of a code, format of scales and minima (the third has none)."""

    Q4_HALF = 0
    Q4_FULL = 1
    Q8_HALF = 2
    Q8_FULL = 3

    @property
    def tile_bytes(self) -> int:
        return (160, 192, 272, 320)[self]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight matrix [rows, 32 * groups] in panels: `data` uint8 [panels * groups * tile bytes]."""

    kind: Kind
    rows: int
    groups: int
    data: Bytes


def pack_q4_0(raw: Bytes, rows: int) -> PackedMatrix:
    """ggml Q4_0, uint8 [rows * blocks * 18]: w = d * (q - 8), here with the minimum -8 d, which is exact.

    Raises:
        ValueError: -8 d does not fit float16.
    """
    blocks = raw.reshape(rows, -1, 18)
    scales = _halves(blocks, 0)
    with np.errstate(over="ignore"):
        minima = np.multiply(scales, np.float16(-8), dtype=np.float16)
    if not np.isfinite(minima).all():
        raise ValueError("scales beyond float16")
    return _pack_four(blocks[:, :, 2:], scales, minima, Kind.Q4_HALF)


def pack_q4_1(raw: Bytes, rows: int) -> PackedMatrix:
    """ggml Q4_1, uint8 [rows * blocks * 20]: w = d * q + m."""
    blocks = raw.reshape(rows, -1, 20)
    return _pack_four(blocks[:, :, 4:], _halves(blocks, 0), _halves(blocks, 2), Kind.Q4_HALF)


def pack_q8_0(raw: Bytes, rows: int) -> PackedMatrix:
    """ggml Q8_0, uint8 [rows * blocks * 34]: w = d * q."""
    blocks = raw.reshape(rows, -1, 34)
    codes = blocks[:, :, 2:] ^ np.uint8(128)  # two's complement plus 128
    return pack_eight(codes, _halves(blocks, 0), None)


def pack_four(codes: Codes, scales: Floats, minima: Floats) -> PackedMatrix:
    """Codes 0 to 15, uint8 [rows, groups, 32], scales and minima float32 [rows, groups]: w = d * q + m."""
    nibbles = codes[:, :, :16] | codes[:, :, 16:] << np.uint8(4)
    return _pack_four(nibbles.astype(np.uint8, copy=False), scales, minima, Kind.Q4_FULL)


def pack_eight(
    codes: Codes, scales: npt.NDArray[np.floating], minima: npt.NDArray[np.floating] | None
) -> PackedMatrix:
    """Codes with 128 added, uint8 [rows, groups, 32]: w = d * (q - 128) + m.

    Without minima, scales are float16 [rows, groups]; with them, both are float32.
    """
    kind = Kind.Q8_HALF if minima is None else Kind.Q8_FULL
    return _assemble(codes, scales, minima, kind, GROUP)


def quantise(weight: Floats) -> PackedMatrix:
    """Any weight, float32 [rows, cols] and finite: 8 bit in groups of 32, float16 scales as in Q8_0.

    Columns are filled up with zeros to whole groups.

    Raises:
        ValueError: weights so large that a scale does not fit float16.
    """
    rows, columns = weight.shape
    padded = -(-columns // GROUP) * GROUP
    if padded != columns:
        weight = np.pad(weight, ((0, 0), (0, padded - columns)))
    groups = weight.reshape(rows, -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError("weights beyond 8 bit with float16 scales")
    used = halves.astype(np.float32)
    inverse = np.divide(1, used, out=np.zeros_like(used), where=used > 0)
    codes = np.rint(groups * inverse[:, :, None])
    np.clip(codes, -127, 127, out=codes)
    codes += 128
    return pack_eight(codes.astype(np.uint8), halves, None)


def _halves(blocks: Bytes, offset: int) -> npt.NDArray[np.float16]:
    """float16 [rows, blocks] at an offset in each block."""
    return np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view("<f2")[:, :, 0]


def _pack_four(
    nibbles: Bytes,
    scales: npt.NDArray[np.floating],
    minima: npt.NDArray[np.floating],
    kind: Kind,
) -> PackedMatrix:
    """`nibbles` uint8 [rows, groups, 16]: values k and k + 16 in the halves of byte k."""
    return _assemble(nibbles, scales, minima, kind, GROUP // 2)


def _assemble(
    codes: Bytes,
    scales: npt.NDArray[np.floating],
    minima: npt.NDArray[np.floating] | None,
    kind: Kind,
    width: int,
) -> PackedMatrix:
    """Tiles of `width` code bytes a row and group; rows are filled up with zeros to whole panels."""
    rows, groups = scales.shape
    missing = -rows % LANES
    if missing:
        codes = np.pad(codes, ((0, missing), (0, 0), (0, 0)))
        scales = np.pad(scales, ((0, missing), (0, 0)))
        minima = None if minima is None else np.pad(minima, ((0, missing), (0, 0)))
    panels = (rows + missing) // LANES
    tiles = np.empty((panels, groups, kind.tile_bytes), dtype=np.uint8)
    words = np.ascontiguousarray(codes).view(np.uint32).reshape(panels, LANES, groups, width // 4)
    body = tiles[:, :, : width * LANES]
    body[...] = np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.uint8).reshape(body.shape)
    end = width * LANES
    for figures in (scales, minima):
        if figures is not None:
            by_lane = np.ascontiguousarray(figures.reshape(panels, LANES, groups).transpose(0, 2, 1))
            each = LANES * by_lane.dtype.itemsize
            tiles[:, :, end : end + each] = by_lane.view(np.uint8).reshape(panels, groups, each)
            end += each
    return PackedMatrix(kind, rows, groups, tiles.reshape(-1))
