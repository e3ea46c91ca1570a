// What this machine can do at most, to hold the kernels against: benchmarks/cpu.py.
#pragma once

#include "simd.h"

namespace baton {

// Multiplies bytes, 32 at a time and independent of each other, `rounds` times 12; returns anything.
inline int32_t multiply_bytes(int64_t rounds) {
  static_assert(sizeof(S16) == sizeof(B32));
  const int8_t four[4] = {1, 2, 3, 4};
  S16 sums[12];
  for (int i = 0; i < 12; i++) std::memset(&sums[i], i, sizeof(S16));
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      B32 bytes;
      std::memcpy(&bytes, &sums[i], sizeof(B32));
      sums[i] = dot_pairs(bytes, four);
    }
  }
  int32_t lanes[8], total = 0;
  for (int i = 0; i < 12; i++) {
    istore(lanes, fold_pairs<1>(sums[i]));
    for (int lane : lanes) total += lane;
  }
  return total;
}

// Multiplies and adds floats, 8 at a time, `rounds` times 12.
inline float multiply_floats(int64_t rounds) {
  F8 sums[12];
  for (int i = 0; i < 12; i++) sums[i] = spread(float(i));
  const F8 a = spread(0.5f), b = spread(1.0f);
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sums[i] = fma(sums[i], a, b);
  }
  float total = 0.0f;
  for (int i = 0; i < 12; i++) total += lane_sum(sums[i]);
  return total;
}

// Reads `bytes`, a multiple of 128, once.
inline int32_t read_bytes(const uint8_t* data, int64_t bytes) {
  I8 sums[4] = {izero(), izero(), izero(), izero()};
  for (int64_t at = 0; at < bytes; at += 128) {
    prefetch(data + at + 4096);
    prefetch(data + at + 4096 + 64);
    for (int i = 0; i < 4; i++) {
      sums[i] = iadd(sums[i], iload(reinterpret_cast<const int32_t*>(data + at + 32 * i)));
    }
  }
  int32_t lanes[8], total = 0;
  for (const I8& sum : sums) {
    istore(lanes, sum);
    for (int lane : lanes) total = int32_t(uint32_t(total) + uint32_t(lane));
  }
  return total;
}

}  // namespace baton
