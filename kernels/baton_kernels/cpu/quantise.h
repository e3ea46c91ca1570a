// Activations as signed bytes, one scale a row and group of 32 values.
#pragma once

#include "simd.h"

namespace baton {

constexpr int ROW_BLOCK = 64;  // rows of a linear layer that are worked on while a tile of weights is at hand

// Quantised rows, laid out [block of 64 rows][group][row of the block][32]; the figures of a group likewise.
struct Quantised {
  int8_t* bytes;
  float* scale;
  float* weighted;  // scale * sum: what a constant under the weights adds
  int32_t* sum;
};

// Where a group of a row lies, in units of groups. The last block is as wide as its rows.
inline int64_t group_at(int row, int group, int rows, int groups) {
  const int block = row / ROW_BLOCK * ROW_BLOCK;
  const int wide = rows - block < ROW_BLOCK ? rows - block : ROW_BLOCK;
  return int64_t(block) * groups + int64_t(group) * wide + (row - block);
}

inline void quantise_row(const float* x, const Quantised& to, int row, int rows, int groups) {
  for (int group = 0; group < groups; group++, x += GROUP) {
    const int64_t at = group_at(row, group, rows, groups);
    F8 v[4];
    I8 largest = izero();
    for (int i = 0; i < 4; i++) {
      v[i] = load(x + i * LANES);
      largest = largest_bits(largest, v[i]);
    }
    int32_t words[8];
    istore(words, largest);
    uint32_t word = 0;
    for (int i = 0; i < 8; i++) word = uint32_t(words[i]) > word ? uint32_t(words[i]) : word;
    float most;
    std::memcpy(&most, &word, 4);
    // A NaN takes the other branch and spoils the scale: it must come out at the end. So does an infinity.
    const bool nothing = most < 1e-30f;
    const float scale = nothing ? 0.0f : most * (1.0f / 127.0f);
    const F8 inverse = spread(nothing ? 0.0f : 127.0f / most);
    I8 q[4], total = izero();
    for (int i = 0; i < 4; i++) {
      q[i] = isub(bits(add(mul(v[i], inverse), spread(ROUNDER))), ispread(ROUNDER_BITS));
      total = iadd(total, q[i]);
    }
    store_bytes(to.bytes + at * GROUP, q[0], q[1], q[2], q[3]);
    istore(words, total);
    uint32_t sum = 0;
    for (int i = 0; i < 8; i++) sum += uint32_t(words[i]);
    to.scale[at] = scale;
    to.sum[at] = int32_t(sum);
    to.weighted[at] = scale * float(int32_t(sum));
  }
}

}  // namespace baton
