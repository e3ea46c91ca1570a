// Packed weights: panels of 8 output rows, each a tile for every 32 values along K. A vector lane is an output
// row, so a row's sum is formed in one lane in the order of its groups, whatever else is computed beside it.
//
//   codes    4 bit: 128 bytes, byte [v][row][k] holds value 4v + k in its low and 16 + 4v + k in its high half
//            8 bit: 256 bytes, byte [v][row][k] holds value 4v + k
//   scales   8 of them, float16 or float32; then, in the kinds that have them, 8 minima
//
// A weight is scale * code + min; an 8-bit code is stored with 128 added.
#pragma once

#include "simd.h"

namespace baton {

enum Kind : int32_t { Q4_HALF = 0, Q4_FULL = 1, Q8_HALF = 2, Q8_FULL = 3 };

struct Q4Half {
  static constexpr bool EIGHT = false, MINIMA = true;
  static constexpr int CODES = 128, BYTES = 160;
  static F8 scales(const uint8_t* tile) { return halves(reinterpret_cast<const uint16_t*>(tile + CODES)); }
  static F8 minima(const uint8_t* tile) {
    return halves(reinterpret_cast<const uint16_t*>(tile + CODES + 16));
  }
};

struct Q4Full {
  static constexpr bool EIGHT = false, MINIMA = true;
  static constexpr int CODES = 128, BYTES = 192;
  static F8 scales(const uint8_t* tile) { return load(reinterpret_cast<const float*>(tile + CODES)); }
  static F8 minima(const uint8_t* tile) { return load(reinterpret_cast<const float*>(tile + CODES + 32)); }
};

struct Q8Half {
  static constexpr bool EIGHT = true, MINIMA = false;
  static constexpr int CODES = 256, BYTES = 272;
  static F8 scales(const uint8_t* tile) { return halves(reinterpret_cast<const uint16_t*>(tile + CODES)); }
  static F8 minima(const uint8_t*) { return zero(); }
};

struct Q8Full {
  static constexpr bool EIGHT = true, MINIMA = true;
  static constexpr int CODES = 256, BYTES = 320;
  static F8 scales(const uint8_t* tile) { return load(reinterpret_cast<const float*>(tile + CODES)); }
  static F8 minima(const uint8_t* tile) { return load(reinterpret_cast<const float*>(tile + CODES + 32)); }
};

// One weight matrix [rows, 32 * groups], rows padded to whole panels.
struct Packed {
  const uint8_t* data;
  int32_t kind;
  int32_t rows;
  int32_t groups;
  int32_t column;  // of the output, where its first row goes
};

inline int panels(const Packed& w) { return (w.rows + LANES - 1) / LANES; }

// One row of a matrix as float32, as the file's own format gives it.
template <class Tile>
void unpack_row(const Packed& w, int row, float* out) {
  const uint8_t* tile = w.data + int64_t(row / LANES) * w.groups * Tile::BYTES;
  const int lane = row % LANES;
  for (int group = 0; group < w.groups; group++, tile += Tile::BYTES, out += GROUP) {
    float scales[8], minima[8];
    store(scales, Tile::scales(tile));
    store(minima, Tile::minima(tile));
    for (int k = 0; k < GROUP; k++) {
      const int half = Tile::EIGHT ? k : k % 16;
      const uint8_t byte = tile[half / 4 * 32 + lane * 4 + half % 4];
      const int code = Tile::EIGHT ? int(byte) - 128 : k < 16 ? byte & 15 : byte >> 4;
      const float scaled = scales[lane] * float(code);
      out[k] = Tile::MINIMA ? scaled + minima[lane] : scaled;
    }
  }
}

inline void unpack_row(const Packed& w, int row, float* out) {
  switch (w.kind) {
    case Q4_HALF: return unpack_row<Q4Half>(w, row, out);
    case Q4_FULL: return unpack_row<Q4Full>(w, row, out);
    case Q8_HALF: return unpack_row<Q8Half>(w, row, out);
    case Q8_FULL: return unpack_row<Q8Full>(w, row, out);
  }
}

}  // namespace baton
