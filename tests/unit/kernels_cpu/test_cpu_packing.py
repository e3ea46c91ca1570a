"""Weights in panels mean what the file's blocks mean, exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from baton.models.dequant import dequantise
from baton.models.errors import UnsupportedModel
from baton.models.ggml_types import GgmlType
from baton.runner.native_blocks import kind_of, matrix_bytes, pack_blocks
from baton_kernels.cpu.packing import Kind, PackedMatrix, quantise

Floats = npt.NDArray[np.float32]
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")


def unpacked(packed: PackedMatrix, columns: int) -> Floats:
    """A matrix [rows, columns] out of its panels, by the words of tiles.h, one value at a time."""
    tile = packed.data.reshape(-1, packed.groups, packed.kind.tile_bytes)
    four = packed.kind in (Kind.Q4_HALF, Kind.Q4_FULL)
    codes_end = 128 if four else 256
    figure = np.dtype("<f2") if packed.kind in (Kind.Q4_HALF, Kind.Q8_HALF) else np.dtype("<f4")
    out = np.zeros((packed.rows, packed.groups * 32), dtype=np.float32)
    for row in range(packed.rows):
        panel, lane = divmod(row, 8)
        for group in range(packed.groups):
            raw = tile[panel, group]
            figures = raw[codes_end:].view(figure).astype(np.float32)
            for k in range(32):
                place = k % 16 if four else k
                byte = int(raw[place // 4 * 32 + lane * 4 + place % 4])
                code = (byte & 15 if k < 16 else byte >> 4) if four else byte - 128
                value = np.float32(figures[lane] * np.float32(code))
                if packed.kind != Kind.Q8_HALF:
                    value = np.float32(value + figures[8 + lane])
                out[row, group * 32 + k] = value
    return out[:, :columns]


def random_blocks(kind: GgmlType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Random codes with scales that are finite."""
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (rows * columns // kind.block_values, kind.block_bytes), dtype=np.uint8)
    blocks[:, 1] &= 0x3B
    if kind.name not in ("Q4_0", "Q5_0", "Q8_0"):
        blocks[:, 3] &= 0x3B
    return blocks.reshape(-1)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("rows", [8, 13])
def test_blocks_are_kept_exactly(name: str, rows: int) -> None:
    kind, columns = GgmlType[name], 512
    raw = random_blocks(kind, rows, columns)
    packed = pack_blocks(kind, raw, rows, columns, "w")
    assert packed.kind == kind_of(kind)
    assert packed.data.nbytes == matrix_bytes(packed.kind, rows, columns)
    expected = dequantise(kind, raw, (rows, columns))
    if name == "Q4_0":  # d * (q - 8) here is d * q - 8 d: the same number, rounded once more
        np.testing.assert_allclose(unpacked(packed, columns), expected, rtol=1e-6, atol=1e-12)
    else:
        np.testing.assert_array_equal(unpacked(packed, columns), expected)


def test_floats_become_eight_bits_in_groups() -> None:
    weight = np.random.default_rng(0).standard_normal((11, 40)).astype(np.float32)
    weight[:, 3] *= 50  # an outlier coarsens its own group only
    weight[4] = 0
    packed = quantise(weight)
    result = unpacked(packed, 40)
    groups = np.pad(weight, ((0, 0), (0, 24))).reshape(11, 2, 32)
    step = np.repeat(np.abs(groups).max(axis=2) / 127, 32, axis=1)[:, :40]
    assert (np.abs(result - weight) <= step * 0.51 + np.abs(weight) * 1e-3).all()
    assert (result[4] == 0).all()
    assert packed.data.nbytes == matrix_bytes(Kind.Q8_HALF, 11, 40)


def test_what_does_not_fit_is_refused() -> None:
    weight = np.full((8, 32), 1e9, dtype=np.float32)
    with pytest.raises(UnsupportedModel, match=r"'w'.*--engine torch"):
        pack_blocks(GgmlType.F32, weight.view(np.uint8), 8, 32, "w")
    blocks = random_blocks(GgmlType.Q4_0, 8, 32).reshape(-1, 18)
    blocks[0, :2] = np.frombuffer(np.float16(60_000).tobytes(), dtype=np.uint8)
    with pytest.raises(UnsupportedModel, match="float16"):
        pack_blocks(GgmlType.Q4_0, blocks, 8, 32, "w")
