// Linear layers: packed weights times quantised rows.
//
// Per tile and row: the integer dot product is exact (15 * 127 * 2 * 8 = 30,480 fits 16 bits), then two fused
// multiply-adds, group after group. The loops differ in what they keep at hand, never in that order.
#pragma once

#include "quantise.h"
#include "tiles.h"

namespace baton {

// Where results go: `out` [rows, stride] with the matrix's own columns first.
struct Output {
  float* out;
  int64_t stride;
  const int32_t* rows;  // the row of `out` for each row computed; null: the same
  bool adds;            // add to what is there
};

inline void put(const Output& to, int row, int column, F8 value) {
  float* at = to.out + (to.rows ? to.rows[row] : row) * to.stride + column;
  store(at, to.adds ? add(load(at), value) : value);
}

// Eight vectors of nibbles: the values 4v to 4v + 3 of each row in vector v.
struct Nibbles {
  B32 v[8];
};

inline I8 dot(const Nibbles& w, const int8_t* a) {
  const S16 first = add16(add16(dot_pairs(w.v[0], a), dot_pairs(w.v[1], a + 4)),
                          add16(dot_pairs(w.v[2], a + 8), dot_pairs(w.v[3], a + 12)));
  const S16 second = add16(add16(dot_pairs(w.v[4], a + 16), dot_pairs(w.v[5], a + 20)),
                           add16(dot_pairs(w.v[6], a + 24), dot_pairs(w.v[7], a + 28)));
  return fold_pairs(add16(first, second));
}

inline Nibbles four_bit(const uint8_t* tile) {
  Nibbles n;
  for (int i = 0; i < 4; i++) {
    const B32 both = load_bytes(tile + 32 * i);
    n.v[i] = low_nibbles(both);
    n.v[4 + i] = high_nibbles(both);
  }
  return n;
}

template <bool HIGH>
Nibbles eight_bit(const uint8_t* tile) {
  Nibbles n;
  for (int i = 0; i < 8; i++) {
    const B32 both = load_bytes(tile + 32 * i);
    n.v[i] = HIGH ? high_nibbles(both) : low_nibbles(both);
  }
  return n;
}

// 16 * high + low - 128 * sum: the dot product of codes that had 128 added.
inline I8 joined(I8 high, I8 low, int32_t sum) {
  return isub(iadd(shift_left<4>(high), low), ispread(int32_t(uint32_t(sum) << 7)));
}

template <class Tile>
F8 accumulate(F8 sum, I8 product, F8 scales, F8 minima, const Quantised& a, int64_t at) {
  sum = fma(to_float(product), mul(scales, spread_at(a.scale + at)), sum);
  return Tile::MINIMA ? fma(minima, spread_at(a.weighted + at), sum) : sum;
}

// A few rows: sums stay in registers along all of K.
template <class Tile, int ROWS>
void few_rows(const Packed& w, int from, int to, const Quantised& a, const Output& out) {
  for (int panel = from; panel < to; panel++) {
    const uint8_t* tile = w.data + int64_t(panel) * w.groups * Tile::BYTES;
    F8 sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = zero();
    for (int group = 0; group < w.groups; group++, tile += Tile::BYTES) {
      const F8 scales = Tile::scales(tile), minima = Tile::minima(tile);
      I8 products[ROWS];
      if constexpr (Tile::EIGHT) {
        const Nibbles high = eight_bit<true>(tile);
        for (int r = 0; r < ROWS; r++) products[r] = dot(high, a.bytes + (int64_t(group) * ROWS + r) * GROUP);
        const Nibbles low = eight_bit<false>(tile);
        for (int r = 0; r < ROWS; r++) {
          const int64_t at = int64_t(group) * ROWS + r;
          products[r] = joined(products[r], dot(low, a.bytes + at * GROUP), a.sum[at]);
        }
      } else {
        const Nibbles codes = four_bit(tile);
        for (int r = 0; r < ROWS; r++) products[r] = dot(codes, a.bytes + (int64_t(group) * ROWS + r) * GROUP);
      }
      for (int r = 0; r < ROWS; r++) {
        sums[r] = accumulate<Tile>(sums[r], products[r], scales, minima, a, int64_t(group) * ROWS + r);
      }
    }
    for (int r = 0; r < ROWS; r++) put(out, r, w.column + panel * LANES, sums[r]);
  }
}

// A block of up to 64 rows, the first of them `first`: a tile is unpacked once for all of them, the sums lie in
// the first-level cache.
template <class Tile>
void block_of_rows(const Packed& w, int from, int to, const Quantised& a, int first, int rows,
                   const Output& out) {
  F8 sums[ROW_BLOCK];
  I8 products[ROW_BLOCK];
  for (int panel = from; panel < to; panel++) {
    const uint8_t* tile = w.data + int64_t(panel) * w.groups * Tile::BYTES;
    for (int r = 0; r < rows; r++) sums[r] = zero();
    for (int group = 0; group < w.groups; group++, tile += Tile::BYTES) {
      const int64_t at = int64_t(first) * w.groups + int64_t(group) * rows;
      const int8_t* bytes = a.bytes + at * GROUP;
      const F8 scales = Tile::scales(tile), minima = Tile::minima(tile);
      if constexpr (Tile::EIGHT) {
        const Nibbles high = eight_bit<true>(tile);
        for (int r = 0; r < rows; r++) products[r] = dot(high, bytes + r * GROUP);
        const Nibbles low = eight_bit<false>(tile);
        for (int r = 0; r < rows; r++) {
          const I8 product = joined(products[r], dot(low, bytes + r * GROUP), a.sum[at + r]);
          sums[r] = accumulate<Tile>(sums[r], product, scales, minima, a, at + r);
        }
      } else {
        const Nibbles codes = four_bit(tile);
        for (int r = 0; r < rows; r++) {
          sums[r] = accumulate<Tile>(sums[r], dot(codes, bytes + r * GROUP), scales, minima, a, at + r);
        }
      }
    }
    for (int r = 0; r < rows; r++) put(out, first + r, w.column + panel * LANES, sums[r]);
  }
}

template <class Tile>
void linear(const Packed& w, int from, int to, const Quantised& a, int rows, const Output& out) {
  switch (rows) {
    case 1: return few_rows<Tile, 1>(w, from, to, a, out);
    case 2: return few_rows<Tile, 2>(w, from, to, a, out);
    case 3: return few_rows<Tile, 3>(w, from, to, a, out);
    case 4: return few_rows<Tile, 4>(w, from, to, a, out);
  }
  for (int first = 0; first < rows; first += ROW_BLOCK) {
    const int wide = rows - first < ROW_BLOCK ? rows - first : ROW_BLOCK;
    block_of_rows<Tile>(w, from, to, a, first, wide, out);
  }
}

// Panels `from` to `to` of w, for all rows.
inline void linear(const Packed& w, int from, int to, const Quantised& a, int rows, const Output& out) {
  switch (w.kind) {
    case Q4_HALF: return linear<Q4Half>(w, from, to, a, rows, out);
    case Q4_FULL: return linear<Q4Full>(w, from, to, a, rows, out);
    case Q8_HALF: return linear<Q8Half>(w, from, to, a, rows, out);
    case Q8_FULL: return linear<Q8Full>(w, from, to, a, rows, out);
  }
}

}  // namespace baton
