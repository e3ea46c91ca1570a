// Attention of single tokens: the queries that share a KV head, one split of keys at a time, straight from the
// pages.
#pragma once

#include "pages.h"
#include "softmax.h"

namespace baton {

// Blocks lie far apart, where no hardware prefetcher follows.
inline void prefetch_rows(const uint16_t* row, int values) {
  for (int i = 0; i < values; i += 32) prefetch(row + i);
}

// Scores of keys `first` to `first + n` for COUNT queries [head_dim] each: out [COUNT, SPLIT]. The sum over the
// dimensions is formed in 8 lanes, then as `sums_of_four` says.
template <int COUNT>
void scores_of(const Pages& pages, const int32_t* table, int head, int first, int n, const float* queries,
               float* out) {
  const int dim = pages.head_dim, block = 1 << pages.block_shift;
  for (int begin = 0; begin < n; begin += 4) {
    const uint16_t* keys = pages.keys(table, first + begin, head);
    if (begin + block < n) prefetch_rows(pages.keys(table, first + begin + block, head), 4 * dim);
    F8 sums[COUNT][4];
    BATON_UNROLL
    for (int q = 0; q < COUNT; q++) {
      BATON_UNROLL
      for (int k = 0; k < 4; k++) sums[q][k] = zero();
    }
    for (int d = 0; d < dim; d += LANES) {
      // Twelve sums, three queries and one key at a time: all sixteen registers.
      F8 query[COUNT];
      BATON_UNROLL
      for (int q = 0; q < COUNT; q++) query[q] = load(queries + q * dim + d);
      BATON_UNROLL
      for (int k = 0; k < 4; k++) {
        const F8 key = halves(keys + k * dim + d);
        BATON_UNROLL
        for (int q = 0; q < COUNT; q++) sums[q][k] = fma(query[q], key, sums[q][k]);
      }
    }
    BATON_UNROLL
    for (int q = 0; q < COUNT; q++) {
      sums_of_four(sums[q][0], sums[q][1], sums[q][2], sums[q][3], out + q * SPLIT + begin);
    }
  }
}

// Values weighted and added, key after key: WIDE vectors of the dimensions from `from` on.
template <int COUNT, int WIDE>
void values_of(const Pages& pages, const int32_t* table, int head, int first, int n, const float* weights,
               int from, float* records) {
  const int dim = pages.head_dim, size = 1 << pages.block_shift;
  F8 sums[COUNT][WIDE];
  BATON_UNROLL
  for (int q = 0; q < COUNT; q++) {
    BATON_UNROLL
    for (int i = 0; i < WIDE; i++) sums[q][i] = zero();
  }
  for (int done = 0; done < n;) {
    const int rest = size - ((first + done) & (size - 1)), here = rest < n - done ? rest : n - done;
    const uint16_t* values = pages.values(table, first + done, head) + from;
    const uint16_t* next = done + here < n ? pages.values(table, first + done + here, head) + from : values;
    for (int k = 0; k < here; k++, values += dim, next += dim) {
      prefetch(next);
      F8 weight[COUNT];
      BATON_UNROLL
      for (int q = 0; q < COUNT; q++) weight[q] = spread_at(weights + q * SPLIT + done + k);
      BATON_UNROLL
      for (int i = 0; i < WIDE; i++) {
        const F8 value = halves(values + i * LANES);
        BATON_UNROLL
        for (int q = 0; q < COUNT; q++) sums[q][i] = fma(weight[q], value, sums[q][i]);
      }
    }
    done += here;
  }
  BATON_UNROLL
  for (int q = 0; q < COUNT; q++) {
    BATON_UNROLL
    for (int i = 0; i < WIDE; i++) {
      store(records + q * record_size(dim) + VALUES + from + i * LANES, sums[q][i]);
    }
  }
}

template <int COUNT>
void attend_some(const Pages& pages, const int32_t* table, int head, int first, int n, const float* queries,
                 float* scores, float* records) {
  const int dim = pages.head_dim;
  scores_of<COUNT>(pages, table, head, first, n, queries, scores);
  BATON_UNROLL
  for (int q = 0; q < COUNT; q++) {
    float* record = records + q * record_size(dim);
    softmax(scores + q * SPLIT, n, record, record + 1);
  }
  int from = 0;
  for (; from + 4 * LANES <= dim; from += 4 * LANES) {
    values_of<COUNT, 4>(pages, table, head, first, n, scores, from, records);
  }
  for (; from < dim; from += LANES) {
    values_of<COUNT, 1>(pages, table, head, first, n, scores, from, records);
  }
}

// One split for `count` queries [count, head_dim], scaled and turned: records [count, record_size].
// `scores` is scratch [3, SPLIT]; n keys from position `first` on, a multiple of SPLIT.
inline void attend_split(const Pages& pages, const int32_t* table, int head, int first, int n, int count,
                         const float* queries, float* scores, float* records) {
  const int dim = pages.head_dim;
  while (count > 0) {
    const int some = count == 4 ? 2 : count < 3 ? count : 3;
    switch (some) {
      case 1: attend_some<1>(pages, table, head, first, n, queries, scores, records); break;
      case 2: attend_some<2>(pages, table, head, first, n, queries, scores, records); break;
      default: attend_some<3>(pages, table, head, first, n, queries, scores, records); break;
    }
    count -= some;
    queries += some * dim;
    records += some * record_size(dim);
  }
}

}  // namespace baton
