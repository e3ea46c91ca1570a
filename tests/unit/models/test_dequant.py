"""Dequantising: bitwise what ggml's reference gives."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest

from baton.models.dequant import dequantise
from baton.models.errors import ModelFileError
from baton.models.gguf import GgmlType, GgufFile

# Where each type keeps its float16 scales and minima within a block.
HALVES = {
    GgmlType.Q8_0: [0],
    GgmlType.Q4_0: [0],
    GgmlType.Q4_1: [0, 2],
    GgmlType.Q5_0: [0],
    GgmlType.Q5_1: [0, 2],
    GgmlType.Q4_K: [0, 2],
    GgmlType.Q5_K: [0, 2],
    GgmlType.Q6_K: [208],
}


def reference(kind: GgmlType, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows = raw.reshape(*shape[:-1], -1)
    return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType(int(kind))), dtype=np.float32)


def random_blocks(kind: GgmlType, blocks: int, seed: int) -> np.ndarray:
    """Random bytes, their scales finite and of every size and sign. uint8 [blocks * bytes]."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        bits = random.integers(0, 0x7C00, blocks, dtype=np.uint16) | random.choice(
            np.array([0, 0x8000], dtype=np.uint16), blocks
        )
        raw[:, offset : offset + 2] = bits.view(np.uint8).reshape(blocks, 2)
    return raw.ravel()


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_random_blocks_equal_the_reference_bitwise(kind: GgmlType) -> None:
    shape = (37, 3 * kind.block_values)
    for seed in range(4):
        raw = random_blocks(kind, 37 * 3, seed)
        ours = dequantise(kind, raw, shape)
        assert (ours.dtype, ours.shape, ours.flags.c_contiguous) == (np.float32, shape, True)
        assert ours.tobytes() == reference(kind, raw, shape).tobytes()


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_pieces_join_without_a_seam(kind: GgmlType) -> None:
    """More values than are worked on at once."""
    blocks = (1 << 18) // kind.block_values + 5
    raw = random_blocks(kind, blocks, 9)
    shape = (blocks * kind.block_values,)
    assert dequantise(kind, raw, shape).tobytes() == reference(kind, raw, shape).tobytes()


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.F16, GgmlType.BF16], ids=lambda kind: kind.name)
def test_plain_types_equal_the_reference_bitwise(kind: GgmlType) -> None:
    """Every pattern of 16 bits: denormals, infinities and NaNs."""
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    shape = (64, raw.size // kind.block_bytes // 64)
    ours = dequantise(kind, raw, shape)
    assert ours.tobytes() == reference(kind, raw, shape).tobytes()
    ours[0, 0] = 1  # a new array, not the file's map


def test_every_tensor_of_the_real_file_equals_the_reference_bitwise(smollm2: Path) -> None:
    file = GgufFile.open(smollm2)
    assert {info.type for info in file.tensors.values()} == {GgmlType.F32, GgmlType.Q4_1, GgmlType.Q8_0}
    for name, info in file.tensors.items():
        raw = file.raw(name)
        ours = dequantise(info.type, raw, info.shape)
        assert ours.shape == info.shape
        assert np.array_equal(ours.view(np.uint32), reference(info.type, raw, info.shape).view(np.uint32)), (
            name
        )


def test_infinite_scales_pass_without_a_warning() -> None:
    raw = np.zeros(GgmlType.Q4_1.block_bytes, dtype=np.uint8)
    raw[0:2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not np.isfinite(dequantise(GgmlType.Q4_1, raw, (32,))).any()


@pytest.mark.parametrize(
    ("kind", "nbytes", "shape"),
    [
        (GgmlType.Q4_0, 18, (33,)),
        (GgmlType.Q4_0, 17, (32,)),
        (GgmlType.Q4_0, 36, (32,)),
        (GgmlType.F32, 0, (1,)),
        (GgmlType.Q6_K, 210, (128,)),
    ],
)
def test_bytes_that_do_not_fill_the_shape_are_refused(
    kind: GgmlType, nbytes: int, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ModelFileError, match=f"{nbytes} bytes of {kind.name}"):
        dequantise(kind, np.zeros(nbytes, dtype=np.uint8), shape)
