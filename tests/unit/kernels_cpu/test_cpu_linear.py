"""Linear layers: right, and the same bits in any batch, with any threads, on any instruction set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from native_llama import equal_bits, library, quantised, values_of

from baton.models.dequant import dequantise
from baton.models.ggml_types import GgmlType
from baton.runner.native_blocks import pack_blocks
from baton_kernels.cpu import library as c
from baton_kernels.cpu.build import Variant, best_variant
from baton_kernels.cpu.library import COp, CPacked, CShape, CStep
from baton_kernels.cpu.packing import PackedMatrix, quantise

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ROWS, INPUTS, OUTPUTS = 600, 512, 69
KINDS = ("Q4_1", "Q4_K", "Q8_0", "Q5_1")  # one for each layout of tiles
VARIANTS: tuple[Variant, ...] = ("portable",) if best_variant() == "portable" else ("avx2", "portable")


def packed_struct(matrix: PackedMatrix) -> CPacked:
    return CPacked(matrix.data.ctypes.data, matrix.kind, matrix.rows, matrix.groups, 0)


def inputs() -> Floats:
    """Rows with a few large values, as a transformer's are."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, INPUTS)).astype(np.float32)
    x[:, 17] *= 30
    x[5:9, 200] *= 200
    x[3] = 0
    return x


def weights(kind: str) -> tuple[PackedMatrix, Doubles]:
    rng = np.random.default_rng(2)
    ggml = GgmlType[kind]
    blocks = OUTPUTS * INPUTS // ggml.block_values
    raw = rng.integers(0, 256, (blocks, ggml.block_bytes), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.01, (blocks, 2)).astype("<f2")
    raw[:, :2] = scale[:, :1].copy().view(np.uint8)
    if kind != "Q8_0":
        raw[:, 2:4] = scale[:, 1:].copy().view(np.uint8)
    exact = dequantise(ggml, raw.reshape(-1), (OUTPUTS, INPUTS)).astype(np.float64)
    return pack_blocks(ggml, raw, OUTPUTS, INPUTS, "w"), exact


class Layer:
    """A norm and a linear layer: rows of a table in, one output row each."""

    def __init__(self, kind: str, variant: Variant, threads: int) -> None:
        self.table = quantise(inputs())
        self.matrix, self.exact = weights(kind)
        self.norm = np.ones(INPUTS, dtype=np.float32)
        embed = COp(c.EMBED, parts=1)
        embed.part[0] = packed_struct(self.table)
        project = COp(c.PROJECT, c.NORMED, c.TO_LOGITS, sampled_only=1, parts=1, norm=self.norm.ctypes.data)
        project.part[0] = packed_struct(self.matrix)
        shape = CShape(INPUTS, 1, 1, 8, 8, 1, 16, ROWS, 1e-6)
        self._executor = library(variant).executor(shape, [embed, project], threads)

    def run(self, rows: list[int]) -> Floats:
        ids = np.array(rows, dtype=np.int32)
        span = np.array([0, len(rows), 0, 0], dtype=np.int32)
        table = np.zeros(len(rows), dtype=np.int32)
        sampled = np.arange(len(rows), dtype=np.int32)
        out = np.zeros((len(rows), -(-OUTPUTS // 8) * 8), dtype=np.float32)
        self._executor.step(
            CStep(
                rows=len(rows),
                spans=1,
                sampled=len(rows),
                blocks=1,
                ids=ids.ctypes.data,
                span=span.ctypes.data,
                tables=table.ctypes.data,
                sampled_rows=sampled.ctypes.data,
                logits=out.ctypes.data,
                logits_stride=out.shape[1],
            )
        )
        return out[:, :OUTPUTS]


def normed() -> Doubles:
    """What the layer's rows are before they are quantised, in float64."""
    x = values_of(quantise(inputs()))
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_rounded_inputs(kind: str) -> None:
    layer = Layer(kind, best_variant(), 1)
    x = normed()
    rounded = quantised(x)
    ours = layer.run(list(range(ROWS)))
    # In float32 a code may fall on the other side of a tie: a step of one input off.
    error = np.abs(ours - rounded @ layer.exact.T)
    size = np.abs(rounded) @ np.abs(layer.exact.T)
    assert (error <= 4e-3 * size + 1e-6).all()
    assert np.median(error / (size + 1e-6)) < 1e-6
    assert np.abs(rounded - x).max() < 0.006 * np.abs(x).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_batch(kind: str, variant: Variant) -> None:
    expected = Layer(kind, best_variant(), 1).run(list(range(ROWS)))
    order = np.random.default_rng(3).permutation(ROWS).tolist()
    one, two = Layer(kind, variant, 1), Layer(kind, variant, 2)
    counts = [1, 2, 3, 4, 5, 7, 16, 63, 64, 65, 130, 600] if variant != "portable" else [1, 3, 65]
    for count in counts:
        assert equal_bits(one.run(order[:count]), expected[order[:count]]), count
        assert equal_bits(two.run(order[-count:]), expected[order[-count:]]), count


def test_every_row_count_up_to_600() -> None:
    layer = Layer("Q4_1", best_variant(), 2)
    expected = layer.run(list(range(ROWS)))
    for count in range(1, ROWS + 1):
        assert equal_bits(layer.run(list(range(ROWS - count, ROWS))), expected[ROWS - count :]), count
