"""The tensor types of ggml that Baton reads, with the size of their blocks."""

from __future__ import annotations

import enum


class GgmlType(enum.IntEnum):
    """A tensor's element type, numbered as in ggml (`enum ggml_type` in ggml.h)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_values(self) -> int:
        """Values that one block holds."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes."""
        return _BLOCKS[self][1]


_BLOCKS: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.BF16: (1, 2),
    GgmlType.Q4_0: (32, 2 + 16),
    GgmlType.Q4_1: (32, 4 + 16),
    GgmlType.Q5_0: (32, 2 + 4 + 16),
    GgmlType.Q5_1: (32, 4 + 4 + 16),
    GgmlType.Q8_0: (32, 2 + 32),
    GgmlType.Q4_K: (256, 4 + 12 + 128),
    GgmlType.Q5_K: (256, 4 + 12 + 32 + 128),
    GgmlType.Q6_K: (256, 128 + 64 + 16 + 2),
}

# Types that exist but are not read, so that a refusal can call them by name.
OTHER_TYPES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
