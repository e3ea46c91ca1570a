// What stands before a linear layer: a row of its input, made of what the layer before has left.
#pragma once

#include "softmax.h"

namespace baton {

inline int padded(int n, int to) { return (n + to - 1) / to * to; }

// RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467); x, weight and out are padded with zeros to whole groups.
inline void norm_row(const float* x, const float* weight, int size, float eps, float* out) {
  const int whole = padded(size, GROUP);
  F8 sums[4] = {zero(), zero(), zero(), zero()};
  for (int i = 0; i < whole; i += 4 * LANES) {
    for (int k = 0; k < 4; k++) {
      const F8 v = load(x + i + k * LANES);
      sums[k] = fma(v, v, sums[k]);
    }
  }
  const float sum = lane_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const F8 inverse = spread(1.0f / std::sqrt(sum / float(size) + eps));
  for (int i = 0; i < whole; i += LANES) store(out + i, mul(mul(load(x + i), inverse), load(weight + i)));
}

// silu(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202). `up` starts at the next multiple of 8 after gate.
inline void gate_row(const float* gate, int size, float* out) {
  const float* up = gate + padded(size, LANES);
  for (int i = 0; i < size; i += LANES) {
    const F8 g = load(gate + i);
    const F8 sigmoid = div(spread(1.0f), add(spread(1.0f), exp8(sub(zero(), g))));
    store(out + i, mul(mul(g, sigmoid), load(up + i)));
  }
  for (int i = size; i < padded(size, GROUP); i++) out[i] = 0.0f;
}

// A single token's attention out of the records of its splits, [splits][heads][record].
inline void merge_row(float* records, int splits, int heads, int head_dim, float* out) {
  const int size = record_size(head_dim);
  for (int head = 0; head < heads; head++) {
    float merged[VALUES + 1024];
    std::memcpy(merged, records + int64_t(head) * size, size_t(size) * sizeof(float));
    for (int split = 1; split < splits; split++) {
      fold(merged, records + (int64_t(split) * heads + head) * size, head_dim);
    }
    finish(merged, head_dim, out + head * head_dim);
  }
  for (int i = heads * head_dim; i < padded(heads * head_dim, GROUP); i++) out[i] = 0.0f;
}

}  // namespace baton
