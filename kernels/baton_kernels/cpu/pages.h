// Keys and values in pages, and the rotary embedding on the way there.
#pragma once

#include "simd.h"

namespace baton {

// One layer's part of the KV pool. A block is [layers, 2, kv_heads, block_size, head_dim] of float16, the block
// size a power of two.
struct Pages {
  uint8_t* pool;
  int64_t block_bytes;
  int32_t kv_heads, block_shift, head_dim, layer;

  // Where a position's key or value of one head lies, given its sequence's pool slots. Those that follow in the
  // same block follow in memory.
  uint16_t* keys(const int32_t* table, int position, int head) const { return at(table, position, head); }
  uint16_t* values(const int32_t* table, int position, int head) const {
    return at(table, position, kv_heads + head);
  }

 private:
  uint16_t* at(const int32_t* table, int position, int plane) const {
    const int64_t plane_row = (int64_t(layer) * 2 * kv_heads + plane) << block_shift;
    const int64_t row = plane_row + (position & ((1 << block_shift) - 1));
    return reinterpret_cast<uint16_t*>(pool + table[position >> block_shift] * block_bytes) + row * head_dim;
  }
};

// Rotates halves (Su et al. 2021, arXiv:2104.09864): out = x * scale, turned. `cos` and `sin` are [head_dim / 2].
inline void rotate(const float* x, const float* cos, const float* sin, float scale, int head_dim, float* out) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i++) {
    const float low = x[i], high = x[half + i];
    out[i] = std::fma(low, cos[i], -(high * sin[i])) * scale;
    out[half + i] = std::fma(high, cos[i], low * sin[i]) * scale;
  }
}

// Rounds to float16. What does not fit is clamped: a page never holds anything but finite numbers.
inline void store_page_row(uint16_t* to, const float* x, int head_dim) {
  const F8 most = spread(65504.0f), least = spread(-65504.0f);
  for (int i = 0; i < head_dim; i += LANES) {
    store_halves(to + i, smaller(larger(load(x + i), least), most));
  }
}

// One token's key (turned) and value of one head. `scratch` is [head_dim].
inline void write_kv(const Pages& pages, const int32_t* table, int position, int head, const float* key,
                     const float* value, const float* cos, const float* sin, float* scratch) {
  rotate(key, cos, sin, 1.0f, pages.head_dim, scratch);
  store_page_row(pages.keys(table, position, head), scratch, pages.head_dim);
  store_page_row(pages.values(table, position, head), value, pages.head_dim);
}

}  // namespace baton
