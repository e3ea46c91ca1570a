// Eight lanes of arithmetic, twice: AVX2 intrinsics, and plain loops. Both give the same bits: every operation
// here is either exact or rounded once as IEEE 754 says, and reductions name their order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BATON_AVX2 1
#include <immintrin.h>
#endif

// Before a short loop over an array of vectors: unrolled, the array lives in registers.
#define BATON_UNROLL _Pragma("GCC unroll 8")

namespace baton {

constexpr int LANES = 8;
constexpr int GROUP = 32;  // values along K that share one scale

// Adding and taking away 1.5 * 2^23 rounds |x| < 2^22 to the nearest integer, ties to even; before it is taken
// away, the low bits of the sum are that integer.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4B400000;

// The caches will want the line at p soon.
inline void prefetch(const void* p) { __builtin_prefetch(p); }

#ifdef BATON_AVX2

struct F8 {
  __m256 v;
};
struct I8 {
  __m256i v;
};
struct B32 {  // 32 unsigned bytes
  __m256i v;
};
struct S16 {  // 16 signed halves
  __m256i v;
};

inline F8 zero() { return {_mm256_setzero_ps()}; }
inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 spread(float x) { return {_mm256_set1_ps(x)}; }
inline F8 spread_at(const float* p) { return {_mm256_broadcast_ss(p)}; }
inline F8 add(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 sub(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 mul(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 div(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 larger(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }    // a > b ? a : b
inline F8 smaller(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }  // a < b ? a : b
inline F8 halves(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_halves(uint16_t* p, F8 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

inline I8 izero() { return {_mm256_setzero_si256()}; }
inline I8 ispread(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline I8 ispread_at(const int32_t* p) { return ispread(*p); }
inline I8 iadd(I8 a, I8 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I8 isub(I8 a, I8 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
template <int BITS>
inline I8 shift_left(I8 a) {
  return {_mm256_slli_epi32(a.v, BITS)};
}
inline I8 iload(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void istore(int32_t* p, I8 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline F8 to_float(I8 a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I8 bits(F8 a) { return {_mm256_castps_si256(a.v)}; }
inline F8 as_float(I8 a) { return {_mm256_castsi256_ps(a.v)}; }

inline B32 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline B32 low_nibbles(B32 a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
inline B32 high_nibbles(B32 a) {
  return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))};
}
// Products of 8 x 4 weights (0 to 15) with four activations, neighbours added.
inline S16 dot_pairs(B32 w, const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, 4);
  return {_mm256_maddubs_epi16(w.v, _mm256_set1_epi32(word))};
}
inline S16 add16(S16 a, S16 b) { return {_mm256_add_epi16(a.v, b.v)}; }
// FACTOR times the sum of each pair.
template <int FACTOR>
inline I8 fold_pairs(S16 a) {
  return {_mm256_madd_epi16(a.v, _mm256_set1_epi16(FACTOR))};
}

// Lane sums of four vectors, ((0+1)+(2+3)) + ((4+5)+(6+7)).
inline void sums_of_four(F8 a, F8 b, F8 c, F8 d, float* out) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

inline void transpose(F8 r[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    r[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// 32 integers, saturated to signed bytes.
inline void store_bytes(int8_t* p, I8 a, I8 b, I8 c, I8 d) {
  const __m256i halves = _mm256_packs_epi16(_mm256_packs_epi32(a.v, b.v), _mm256_packs_epi32(c.v, d.v));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(halves, order));
}

// The largest |x| by its bits, so that a NaN is larger than everything.
inline I8 largest_bits(I8 a, F8 x) {
  return {_mm256_max_epu32(a.v, _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7FFFFFFF)))};
}

#else

#include "simd_portable.h"

#endif

inline float lane_sum(F8 a) {
  float v[8];
  store(v, a);
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

inline float lane_max(F8 a) {
  float v[8];
  store(v, a);
  float best = v[0];
  for (int i = 1; i < 8; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// exp(x), x held to [-87, 88]: Cephes' polynomial, relative error 2e-7. NaN stays NaN.
inline F8 exp8(F8 x) {
  x = smaller(spread(88.0f), larger(spread(-87.0f), x));
  const F8 turned = fma(x, spread(1.44269504088896341f), spread(ROUNDER));
  const F8 n = sub(turned, spread(ROUNDER));
  F8 r = fma(n, spread(-0.693359375f), x);
  r = fma(n, spread(2.12194440e-4f), r);
  F8 p = spread(1.9875691500e-4f);
  p = fma(p, r, spread(1.3981999507e-3f));
  p = fma(p, r, spread(8.3334519073e-3f));
  p = fma(p, r, spread(4.1665795894e-2f));
  p = fma(p, r, spread(1.6666665459e-1f));
  p = fma(p, r, spread(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), spread(1.0f));
  const I8 exponent = shift_left<23>(iadd(isub(bits(turned), ispread(ROUNDER_BITS)), ispread(127)));
  return mul(p, as_float(exponent));
}

}  // namespace baton
