"""Weights of 8 and 4 bits, made once when a model is loaded. Plain torch, no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WeightFormat = Literal["plain", "int8", "fp8", "int4"]

RUN = 32  # 4-bit weights: byte i of a run of 32 holds weight i (low half) and weight i + 16


@dataclass(slots=True, frozen=True)
class Weight:
    """A matrix [out, in].

    plain: `values` [out, in], a float type.
    int8, fp8: `values` int8, or uint8 holding e4m3, [out, in]; `scales` float32 [out].
    int4: `values` uint8 [out, in / 2]; weight = number * scale + low, with `scales` and `lows`
        float16 [out, in / group].
    """

    format: WeightFormat
    values: Tensor
    scales: Tensor | None = None
    lows: Tensor | None = None
    group: int = RUN

    @property
    def shape(self) -> tuple[int, int]:
        """Out, in."""
        rows, columns = self.values.shape
        return rows, columns * 2 if self.format == "int4" else columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.lows) if part is not None)

    def dequantised(self) -> Tensor:
        """float32 [out, in]: what the matrix stands for."""
        if self.format == "plain":
            return self.values.float()
        assert self.scales is not None
        if self.format == "int8":
            return self.values.float() * self.scales[:, None]
        if self.format == "fp8":
            return self.values.view(torch.float8_e4m3fn).float() * self.scales[:, None]
        assert self.lows is not None
        rows, columns = self.shape
        runs = self.values.view(rows, columns // RUN, RUN // 2)
        numbers = torch.cat([runs & 0xF, runs >> 4], dim=-1).view(rows, -1, self.group).float()
        return (numbers * self.scales.float()[..., None] + self.lows.float()[..., None]).view(rows, columns)


def quantise(weight: Tensor, format: WeightFormat, group: int = RUN) -> Weight:
    """A float matrix [out, in] in `format`; `plain` keeps it as it is.

    Raises:
        ValueError: int4 with an inner size that its groups do not fill.
    """
    if format == "plain":
        return Weight("plain", weight.contiguous())
    weight = weight.float()
    if format == "int4":
        return _four_bits(weight, group)
    peak = weight.abs().amax(dim=1).clamp_min(1e-12)
    if format == "int8":
        scales = peak / 127
        return Weight("int8", (weight / scales[:, None]).round().to(torch.int8), scales)
    scales = peak / 448
    values = (weight / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Weight("fp8", values.view(torch.uint8), scales)


def _four_bits(weight: Tensor, group: int) -> Weight:
    rows, columns = weight.shape
    if group % RUN or columns % group:
        raise ValueError(
            f"4-bit weights come in groups of a multiple of {RUN}; {columns} columns, group {group}"
        )
    groups = weight.view(rows, columns // group, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scales, lows = ((high - low) / 15).clamp_min(1e-7).half(), low.half()
    numbers = ((groups - lows.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    runs = numbers.to(torch.uint8).view(rows, columns // RUN, 2, RUN // 2)
    packed = runs[:, :, 0] | (runs[:, :, 1] << 4)
    return Weight("int4", packed.reshape(rows, columns // 2), scales, lows, group)
