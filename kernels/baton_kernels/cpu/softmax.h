// Attention's arithmetic on one query: scores to weights, and pieces of a softmax put together.
#pragma once

#include "simd.h"

namespace baton {

// Keys are split at multiples of this position, in every sequence, chunk and batch. A query's scores are turned
// into weights a split at a time, and the splits folded from left to right: its bits follow from its own keys.
constexpr int SPLIT = 128;

// What one split, or several folded, has given for one query and head: the largest score, the sum of the
// weights, and from `VALUES` on the weighted values.
constexpr int VALUES = 8;
inline int record_size(int head_dim) { return VALUES + head_dim; }

// Scores [n] to weights exp(score - largest), zeros from n to the next multiple of 8 (the array reaches there).
inline void softmax(float* scores, int n, float* largest, float* total) {
  const int whole = n / LANES * LANES;
  float most = scores[0];
  if (whole) {
    F8 best = load(scores);
    for (int i = LANES; i < whole; i += LANES) best = larger(best, load(scores + i));
    most = lane_max(best);
  }
  for (int i = whole; i < n; i++) most = scores[i] > most ? scores[i] : most;
  F8 sums = zero();
  for (int i = 0; i < whole; i += LANES) {
    const F8 weights = exp8(sub(load(scores + i), spread(most)));
    store(scores + i, weights);
    sums = add(sums, weights);
  }
  if (whole < n) {
    for (int i = n; i < whole + LANES; i++) scores[i] = most;
    store(scores + whole, exp8(sub(load(scores + whole), spread(most))));
    for (int i = n; i < whole + LANES; i++) scores[i] = 0.0f;
    sums = add(sums, load(scores + whole));
  }
  *largest = most;
  *total = lane_sum(sums);
}

inline float exp1(float x) {
  float v[8];
  store(v, exp8(spread(x)));
  return v[0];
}

// Folds record b, of later keys, into a.
inline void fold(float* a, const float* b, int head_dim) {
  const float most = a[0] > b[0] ? a[0] : b[0];
  const float scale_a = exp1(a[0] - most), scale_b = exp1(b[0] - most);
  a[0] = most;
  a[1] = std::fma(b[1], scale_b, a[1] * scale_a);
  for (int i = VALUES; i < VALUES + head_dim; i += LANES) {
    store(a + i, fma(load(b + i), spread(scale_b), mul(load(a + i), spread(scale_a))));
  }
}

inline void finish(const float* record, int head_dim, float* out) {
  const F8 total = spread(record[1]);
  for (int i = 0; i < head_dim; i += LANES) store(out + i, div(load(record + VALUES + i), total));
}

}  // namespace baton
