// Linear layers: packed weights times quantised rows.
//
// Per tile and row: the integer dot product is exact (15 * 127 * 2 * 8 = 30,480 fits 16 bits), then two fused
// multiply-adds; the same again for a fine plane; and so on, group after group. The loops differ in what they
// keep at hand, never in that order.
#pragma once

#include <bit>

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

// The hardware's own prefetchers stop at the end of a page (one stream, measured: 6.1 ms a token without, 4.7 with).
template <class Tile>
void prefetch_tile(const uint8_t* tile) {
  constexpr int AHEAD = 4096;
  for (int i = 0; i < Tile::BYTES; i += 64) prefetch(tile + AHEAD + i);
}

// One sum after the other, which needs the fewest registers: eight hold codes, three more what a tile needs.
template <int FACTOR = 1>
I8 dot(const Nibbles& w, const int8_t* a) {
  S16 sum = dot_pairs(w.v[0], a);
  for (int i = 1; i < 8; i++) sum = add16(sum, dot_pairs(w.v[i], a + 4 * i));
  return fold_pairs<FACTOR>(sum);
}

inline Nibbles four_bit(const uint8_t* tile) {
  Nibbles n;
  BATON_UNROLL
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
  BATON_UNROLL
  for (int i = 0; i < 8; i++) {
    const B32 both = load_bytes(tile + 32 * i);
    n.v[i] = HIGH ? high_nibbles(both) : low_nibbles(both);
  }
  return n;
}

// Eight bits: 16 * high + low - 128 * sum, the dot product of codes that had 128 added.
inline I8 dot_high(const Nibbles& high, const Plane& a, int64_t at) {
  return isub(dot<16>(high, a.bytes + at * GROUP), ispread_at(a.sum128 + at));
}
inline I8 dot_low(I8 product, const Nibbles& low, const Plane& a, int64_t at) {
  return iadd(product, dot(low, a.bytes + at * GROUP));
}

template <class Tile>
F8 accumulate(F8 sum, I8 product, F8 scales, F8 minima, const Plane& a, int64_t at) {
  sum = fma(to_float(product), mul(scales, spread_at(a.scale + at)), sum);
  return Tile::MINIMA ? fma(minima, spread_at(a.weighted + at), sum) : sum;
}

// The fine plane of one row and group, for an eight-bit tile; apart, to leave the registers to its caller.
template <class Tile>
__attribute__((noinline)) void accumulate_fine(F8* sum, const uint8_t* tile, const Plane& a, int64_t at) {
  const I8 product = dot_low(dot_high(eight_bit<true>(tile), a, at), eight_bit<false>(tile), a, at);
  *sum = accumulate<Tile>(*sum, product, Tile::scales(tile), Tile::minima(tile), a, at);
}

// Which rows of a block have a fine plane in a group: a bit a row.
class FineRows {
 public:
  FineRows(const Quantised& a, int first, int rows, int groups)
      : rows_(a.fine_rows + int64_t(first / ROW_BLOCK) * groups), mask_(~uint64_t(0) >> (ROW_BLOCK - rows)) {}
  uint64_t operator[](int group) const { return rows_[group] & mask_; }

 private:
  const uint64_t* rows_;
  const uint64_t mask_;  // the bytes of rows that are not there are old
};

// A few rows: sums stay in registers along all of K.
template <class Tile, int ROWS>
void few_rows(const Packed& w, int from, int to, const Quantised& a, const Output& out) {
  const FineRows fine(a, 0, ROWS, w.groups);
  for (int panel = from; panel < to; panel++) {
    const uint8_t* tile = w.data + int64_t(panel) * w.groups * Tile::BYTES;
    F8 sums[ROWS];
    BATON_UNROLL
    for (int r = 0; r < ROWS; r++) sums[r] = zero();
    for (int group = 0; group < w.groups; group++, tile += Tile::BYTES) {
      prefetch_tile<Tile>(tile);
      const F8 scales = Tile::scales(tile), minima = Tile::minima(tile);
      const int64_t at = int64_t(group) * ROWS;
      const int8_t* bytes = a.coarse.bytes + at * GROUP;
      I8 products[ROWS];
      if constexpr (Tile::EIGHT) {
        const Nibbles high = eight_bit<true>(tile);
        BATON_UNROLL
        for (int r = 0; r < ROWS; r++) products[r] = dot_high(high, a.coarse, at + r);
        const Nibbles low = eight_bit<false>(tile);
        BATON_UNROLL
        for (int r = 0; r < ROWS; r++) {
          products[r] = dot_low(products[r], low, a.coarse, at + r);
        }
      } else {
        const Nibbles codes = four_bit(tile);
        BATON_UNROLL
        for (int r = 0; r < ROWS; r++) products[r] = dot(codes, bytes + r * GROUP);
      }
      BATON_UNROLL
      for (int r = 0; r < ROWS; r++) {
        sums[r] = accumulate<Tile>(sums[r], products[r], scales, minima, a.coarse, at + r);
      }
      if (const uint64_t some = fine[group]) {
        BATON_UNROLL
        for (int r = 0; r < ROWS; r++) {
          if (!(some >> r & 1)) continue;
          if constexpr (Tile::EIGHT) {
            F8 sum = sums[r];
            accumulate_fine<Tile>(&sum, tile, a.fine, at + r);
            sums[r] = sum;
          } else {
            const I8 product = dot(four_bit(tile), a.fine.bytes + (at + r) * GROUP);
            sums[r] = accumulate<Tile>(sums[r], product, scales, minima, a.fine, at + r);
          }
        }
      }
    }
    BATON_UNROLL
    for (int r = 0; r < ROWS; r++) put(out, r, w.column + panel * LANES, sums[r]);
  }
}

// A block of up to 64 rows, the first of them `first`: a tile is unpacked once for all of them, the sums lie in
// the first-level cache.
template <class Tile>
void block_of_rows(const Packed& w, int from, int to, const Quantised& a, int first, int rows,
                   const Output& out) {
  const FineRows fine(a, first, rows, w.groups);
  F8 sums[ROW_BLOCK];
  I8 products[ROW_BLOCK];
  for (int panel = from; panel < to; panel++) {
    const uint8_t* tile = w.data + int64_t(panel) * w.groups * Tile::BYTES;
    for (int r = 0; r < rows; r++) sums[r] = zero();
    for (int group = 0; group < w.groups; group++, tile += Tile::BYTES) {
      prefetch_tile<Tile>(tile);
      const int64_t at = int64_t(first) * w.groups + int64_t(group) * rows;
      const int8_t* bytes = a.coarse.bytes + at * GROUP;
      const F8 scales = Tile::scales(tile), minima = Tile::minima(tile);
      if constexpr (Tile::EIGHT) {
        const Nibbles high = eight_bit<true>(tile);
        for (int r = 0; r < rows; r++) products[r] = dot_high(high, a.coarse, at + r);
        const Nibbles low = eight_bit<false>(tile);
        for (int r = 0; r < rows; r++) {
          const I8 product = dot_low(products[r], low, a.coarse, at + r);
          sums[r] = accumulate<Tile>(sums[r], product, scales, minima, a.coarse, at + r);
        }
        for (uint64_t rest = fine[group]; rest; rest &= rest - 1) {
          const int r = std::countr_zero(rest);
          accumulate_fine<Tile>(sums + r, tile, a.fine, at + r);
        }
      } else {
        const Nibbles codes = four_bit(tile);
        for (int r = 0; r < rows; r++) {
          sums[r] = accumulate<Tile>(sums[r], dot(codes, bytes + r * GROUP), scales, minima, a.coarse, at + r);
        }
        for (uint64_t rest = fine[group]; rest; rest &= rest - 1) {
          const int r = std::countr_zero(rest);
          const I8 product = dot(codes, a.fine.bytes + (at + r) * GROUP);
          sums[r] = accumulate<Tile>(sums[r], product, scales, minima, a.fine, at + r);
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
