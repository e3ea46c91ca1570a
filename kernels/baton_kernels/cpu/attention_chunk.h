// Attention of a chunk's tokens: a tile of queries against a split of keys, as two small matrix products.
//
// The same sums in the same order as for single tokens: a score in 8 parts (the dimensions modulo 8), folded as
// `sums_of_four` folds its lanes; values key after key, where a hidden key adds exactly zero.
#pragma once

#include "pages.h"
#include "softmax.h"

namespace baton {

// Keys of a split by lanes: out [keys / 8][head_dim][8]. Reads whole groups of 8; blocks are made of these.
inline void keys_by_lane(const Pages& pages, const int32_t* table, int head, int first, int n, float* out) {
  const int dim = pages.head_dim;
  for (int begin = 0; begin < n; begin += LANES, out += dim * LANES) {
    const uint16_t* keys = pages.keys(table, first + begin, head);
    for (int d = 0; d < dim; d += LANES) {
      F8 rows[LANES];
      for (int k = 0; k < LANES; k++) rows[k] = halves(keys + k * dim + d);
      transpose(rows);
      for (int i = 0; i < LANES; i++) store(out + (d + i) * LANES, rows[i]);
    }
  }
}

inline void values_as_floats(const Pages& pages, const int32_t* table, int head, int first, int n, float* out) {
  const int dim = pages.head_dim;
  for (int k = 0; k < n; k++, out += dim) {
    const uint16_t* values = pages.values(table, first + k, head);
    for (int d = 0; d < dim; d += LANES) store(out + d, halves(values + d));
  }
}

// Scores of two queries and 16 keys: out [2, SPLIT].
inline void scores_of_tile(const float* queries, const float* keys, int dim, float* out) {
  F8 early[2][2], late[2][2];
  for (int pair = 0; pair < 4; pair++) {
    F8 sums[2][2][2];  // query, key group, dimension of the pair
    BATON_UNROLL
    for (int i = 0; i < 8; i++) sums[i >> 2][i >> 1 & 1][i & 1] = zero();
    for (int d = 2 * pair; d < dim; d += LANES) {
      BATON_UNROLL
      for (int which = 0; which < 2; which++) {
        const F8 first = load(keys + (d + which) * LANES);
        const F8 second = load(keys + (dim + d + which) * LANES);
        BATON_UNROLL
        for (int q = 0; q < 2; q++) {
          const F8 query = spread_at(queries + q * dim + d + which);
          sums[q][0][which] = fma(query, first, sums[q][0][which]);
          sums[q][1][which] = fma(query, second, sums[q][1][which]);
        }
      }
    }
    BATON_UNROLL
    for (int q = 0; q < 2; q++) {
      BATON_UNROLL
      for (int k = 0; k < 2; k++) {
        const F8 both = add(sums[q][k][0], sums[q][k][1]);
        if (pair == 0) early[q][k] = both;
        if (pair == 1) early[q][k] = add(early[q][k], both);
        if (pair == 2) late[q][k] = both;
        if (pair == 3) late[q][k] = add(late[q][k], both);
      }
    }
  }
  BATON_UNROLL
  for (int q = 0; q < 2; q++) {
    BATON_UNROLL
    for (int k = 0; k < 2; k++) store(out + q * SPLIT + k * LANES, add(early[q][k], late[q][k]));
  }
}

// Weighted values of four queries: weights [4, SPLIT], values [n, dim], records of four.
template <int WIDE>
void values_of_tile(const float* weights, const float* values, int n, int dim, int from, float* records) {
  F8 sums[4][WIDE];
  BATON_UNROLL
  for (int q = 0; q < 4; q++) {
    BATON_UNROLL
    for (int i = 0; i < WIDE; i++) sums[q][i] = zero();
  }
  values += from;
  for (int k = 0; k < n; k++, values += dim) {
    F8 value[WIDE];
    BATON_UNROLL
    for (int i = 0; i < WIDE; i++) value[i] = load(values + i * LANES);
    BATON_UNROLL
    for (int q = 0; q < 4; q++) {
      const F8 weight = spread_at(weights + q * SPLIT + k);
      BATON_UNROLL
      for (int i = 0; i < WIDE; i++) sums[q][i] = fma(weight, value[i], sums[q][i]);
    }
  }
  BATON_UNROLL
  for (int q = 0; q < 4; q++) {
    BATON_UNROLL
    for (int i = 0; i < WIDE; i++) {
      store(records + q * record_size(dim) + VALUES + from + i * LANES, sums[q][i]);
    }
  }
}

// Scratch of one thread, for tiles of up to `queries` queries (a multiple of 4).
struct ChunkScratch {
  float* queries;  // [queries, head_dim], scaled and turned; zeros past the last
  float* scores;   // [queries, SPLIT]
  float* keys;     // [SPLIT, head_dim]
  float* values;   // [SPLIT, head_dim]
  float* records;  // [queries, record_size], the folded ones
  float* fresh;    // [queries, record_size], of one split
};

// A tile: `rows` tokens from position `start` on, `group` queries each, in scratch.queries. Leaves the result
// in scratch.records.
inline void attend_tile(const Pages& pages, const int32_t* table, int head, int start, int rows, int group,
                        const ChunkScratch& scratch) {
  const int dim = pages.head_dim, count = rows * group, padded = (count + 3) / 4 * 4;
  const int end = start + rows, size = record_size(dim);
  for (int first = 0; first < end; first += SPLIT) {
    const int n = end - first < SPLIT ? end - first : SPLIT;
    keys_by_lane(pages, table, head, first, n, scratch.keys);
    values_as_floats(pages, table, head, first, n, scratch.values);
    for (int q = 0; q < padded; q += 2) {
      for (int k = 0; k < n; k += 2 * LANES) {
        scores_of_tile(scratch.queries + q * dim, scratch.keys + int64_t(k) * dim, dim,
                       scratch.scores + q * SPLIT + k);
      }
    }
    for (int q = 0; q < padded; q++) {
      float *scores = scratch.scores + q * SPLIT, *record = scratch.fresh + q * size;
      const int position = start + q / group, seen = q >= count ? 0 : position + 1 - first;
      const int visible = seen < 0 ? 0 : seen < n ? seen : n;
      if (visible) softmax(scores, visible, record, record + 1);
      for (int k = visible; k < n; k++) scores[k] = 0.0f;
    }
    for (int q = 0; q < padded; q += 4) {
      const float* weights = scratch.scores + q * SPLIT;
      int from = 0;
      for (; from + 2 * LANES <= dim; from += 2 * LANES) {
        values_of_tile<2>(weights, scratch.values, n, dim, from, scratch.fresh + q * size);
      }
      if (from < dim) values_of_tile<1>(weights, scratch.values, n, dim, from, scratch.fresh + q * size);
    }
    for (int q = 0; q < count; q++) {
      float *record = scratch.records + q * size, *fresh = scratch.fresh + q * size;
      if (first == 0) {
        std::memcpy(record, fresh, size_t(size) * sizeof(float));
      } else if (start + q / group >= first) {
        fold(record, fresh, dim);
      }
    }
  }
}

}  // namespace baton
