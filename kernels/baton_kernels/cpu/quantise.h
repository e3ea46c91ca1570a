// Activations as signed bytes, one scale a row and group of 32 values.
//
// A few groups hold values far larger than the rest of their row, and nearly all of the rounding error with
// them. Such a group gets a second plane, what the first has left in steps 254 times finer: 16 bits in all.
// (SmolLM2-135M: one group in ten; the error of the log-probabilities is halved, that of the perplexity falls from
// 0.4 to 0.1 %. The largest such groups are there at every row, so a higher border saves next to nothing.)
#pragma once

#include "simd.h"

namespace baton {

constexpr int ROW_BLOCK = 64;  // rows of a linear layer that are worked on while a tile of weights is at hand

// A group is fine when its scale is over this many times the row's root mean square of scales.
constexpr float FINE_FROM = 1.6f;
constexpr float FINER = 254.0f;

// Quantised rows, laid out [block of 64 rows][group][row of the block][32]; the figures of a group likewise.
struct Plane {
  int8_t* bytes;
  float* scale;
  float* weighted;  // scale * sum: what a constant under the weights adds
  int32_t* sum128;  // 128 * sum
};

struct Quantised {
  Plane coarse, fine;
  uint64_t* fine_rows;  // [block][group]: a bit for each row of the block that has a fine plane there
};

// Eight rows share a byte of fine_rows: one thread quantises them, in their order.
constexpr int FINE_STEP = 8;

inline int row_blocks(int rows) { return (rows + ROW_BLOCK - 1) / ROW_BLOCK; }

// Where a group of a row lies, in units of groups. The last block is as wide as its rows.
inline int64_t group_at(int row, int group, int rows, int groups) {
  const int block = row / ROW_BLOCK * ROW_BLOCK;
  const int wide = rows - block < ROW_BLOCK ? rows - block : ROW_BLOCK;
  return int64_t(block) * groups + int64_t(group) * wide + (row - block);
}

// The largest |x| of a group; NaN if there is one.
inline float largest_of_group(const float* x) {
  I8 largest = izero();
  for (int i = 0; i < GROUP; i += LANES) largest = largest_bits(largest, load(x + i));
  uint32_t words[8], word = 0;
  istore(reinterpret_cast<int32_t*>(words), largest);
  for (int i = 0; i < 8; i++) word = words[i] > word ? words[i] : word;
  float most;
  std::memcpy(&most, &word, 4);
  return most;
}

// Codes of x / scale into a plane at `at`; x becomes what they leave.
inline void quantise_group(F8 x[4], float scale, float inverse, const Plane& to, int64_t at) {
  I8 codes[4], total = izero();
  for (int i = 0; i < 4; i++) {
    const F8 turned = add(mul(x[i], spread(inverse)), spread(ROUNDER));
    codes[i] = isub(bits(turned), ispread(ROUNDER_BITS));
    total = iadd(total, codes[i]);
    x[i] = fma(sub(spread(ROUNDER), turned), spread(scale), x[i]);
  }
  store_bytes(to.bytes + at * GROUP, codes[0], codes[1], codes[2], codes[3]);
  uint32_t words[8], sum = 0;
  istore(reinterpret_cast<int32_t*>(words), total);
  for (int i = 0; i < 8; i++) sum += words[i];
  to.scale[at] = scale;
  to.sum128[at] = int32_t(sum << 7);
  to.weighted[at] = scale * float(int32_t(sum));
}

inline void quantise_row(const float* x, const Quantised& to, int row, int rows, int groups) {
  float squares = 0.0f;
  for (int group = 0; group < groups; group++) {
    // A NaN takes the other branch and spoils the scale: it must come out at the end. So must an infinity.
    const float most = largest_of_group(x + group * GROUP);
    const float scale = most < 1e-30f ? 0.0f : most * (1.0f / 127.0f);
    to.coarse.scale[group_at(row, group, rows, groups)] = scale;
    squares = std::fma(scale, scale, squares);
  }
  const float border = std::sqrt(squares / float(groups)) * FINE_FROM;
  const int place = row % ROW_BLOCK;
  uint8_t* flags = reinterpret_cast<uint8_t*>(to.fine_rows + int64_t(row / ROW_BLOCK) * groups) + place / FINE_STEP;
  for (int group = 0; group < groups; group++, x += GROUP) {
    const int64_t at = group_at(row, group, rows, groups);
    const float scale = to.coarse.scale[at];
    F8 v[4];
    for (int i = 0; i < 4; i++) v[i] = load(x + i * LANES);
    quantise_group(v, scale, scale == 0.0f ? 0.0f : 1.0f / scale, to.coarse, at);
    uint8_t& flag = flags[group * 8];
    if (place % FINE_STEP == 0) flag = 0;
    if (scale > border) {
      const float finer = scale * (1.0f / FINER);
      quantise_group(v, finer, 1.0f / finer, to.fine, at);
      flag = uint8_t(flag | 1 << (place % FINE_STEP));
    }
  }
}

}  // namespace baton
