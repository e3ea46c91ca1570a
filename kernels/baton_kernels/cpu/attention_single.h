// Attention of single tokens: the queries that share a KV head, one split of keys at a time, straight from the
// pages.
#pragma once

#include "pages.h"
#include "softmax.h"

namespace baton {

// Scores of keys `first` to `first + n` for COUNT queries [head_dim] each: out [COUNT, SPLIT]. The sum over the
// dimensions is formed in 8 lanes, then as `sums_of_four` says.
template <int COUNT>
void scores_of(const Pages& pages, const int32_t* table, int head, int first, int n, const float* queries,
               float* out) {
  const int dim = pages.head_dim;
  for (int begin = 0; begin < n; begin += 4) {
    const int position = first + begin;
    const uint16_t* keys = pages.keys(table[position / pages.block_size], head) +
                           int64_t(position % pages.block_size) * dim;
    F8 sums[COUNT][4];
    for (int q = 0; q < COUNT; q++) {
      for (int k = 0; k < 4; k++) sums[q][k] = zero();
    }
    for (int d = 0; d < dim; d += LANES) {
      F8 key[4];
      for (int k = 0; k < 4; k++) key[k] = halves(keys + k * dim + d);
      for (int q = 0; q < COUNT; q++) {
        const F8 query = load(queries + q * dim + d);
        for (int k = 0; k < 4; k++) sums[q][k] = fma(query, key[k], sums[q][k]);
      }
    }
    for (int q = 0; q < COUNT; q++) {
      sums_of_four(sums[q][0], sums[q][1], sums[q][2], sums[q][3], out + q * SPLIT + begin);
    }
  }
}

// Values weighted and added, key after key: WIDE vectors of the dimensions from `from` on.
template <int COUNT, int WIDE>
void values_of(const Pages& pages, const int32_t* table, int head, int first, int n, const float* weights,
               int from, float* records) {
  const int dim = pages.head_dim, size = pages.block_size;
  F8 sums[COUNT][WIDE];
  for (int q = 0; q < COUNT; q++) {
    for (int i = 0; i < WIDE; i++) sums[q][i] = zero();
  }
  for (int done = 0; done < n;) {
    const int offset = (first + done) % size;
    const int here = size - offset < n - done ? size - offset : n - done;
    const uint16_t* values = pages.values(table[(first + done) / size], head) + int64_t(offset) * dim + from;
    for (int k = 0; k < here; k++, values += dim) {
      F8 value[WIDE];
      for (int i = 0; i < WIDE; i++) value[i] = halves(values + i * LANES);
      for (int q = 0; q < COUNT; q++) {
        const F8 weight = spread_at(weights + q * SPLIT + done + k);
        for (int i = 0; i < WIDE; i++) sums[q][i] = fma(weight, value[i], sums[q][i]);
      }
    }
    done += here;
  }
  for (int q = 0; q < COUNT; q++) {
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
