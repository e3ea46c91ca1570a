"""Eight-bit numbers by integer arithmetic: the same on every architecture, and under the interpreter.

fp8 is e4m3 without infinities (Micikevicius et al. 2022, arXiv:2209.05433): bias 7, largest 448.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_E4M3: tl.constexpr = tl.constexpr(448.0)
_TO_INTEGER: tl.constexpr = tl.constexpr(12_582_912.0)  # 1.5 * 2^23: adding it rounds, half to even
_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(0.015625)  # 2^-6
_SUBNORMAL: tl.constexpr = tl.constexpr(16_384.0)  # 2^14: its unit in the last place is e4m3's 2^-9
_SUBNORMAL_BITS: tl.constexpr = tl.constexpr(0x46800000)


@triton.jit
def e4m3_over_256(bits):
    """uint8 e4m3 -> float16, 1/256 of the value, exactly; the caller's scale takes the 256 in."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(x):
    """float32, finite -> uint8 e4m3, rounded half to even, held at +-448."""
    size = tl.minimum(tl.abs(x), MAX_E4M3)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + _SUBNORMAL).to(tl.int32, bitcast=True) - _SUBNORMAL_BITS
    code = tl.where(size < _SMALLEST_NORMAL, subnormal, normal)
    return (code | tl.where(x < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def to_int8(x):
    """float32 in +-127 -> int8, rounded half to even."""
    return ((x + _TO_INTEGER) - _TO_INTEGER).to(tl.int8)
