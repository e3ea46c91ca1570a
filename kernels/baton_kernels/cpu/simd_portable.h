// The plain side of simd.h, which includes this within its namespace: for CPUs without AVX2, FMA and F16C, and
// the proof that the vector side computes what it should.
#pragma once

struct F8 {
  float v[8];
};
struct I8 {
  int32_t v[8];
};
struct B32 {
  uint8_t v[32];
};
struct S16 {
  int16_t v[16];
};

#define BATON_EACH(TYPE, COUNT, VALUE)        \
  TYPE r;                                     \
  for (int i = 0; i < COUNT; i++) r.v[i] = VALUE; \
  return r

inline float float_of_bits(uint32_t word) {
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7F800000 | (fraction << 13));
  if (exponent) return float_of_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}

// To the nearest, ties to even; beyond the range to infinity.
inline uint16_t float_to_half(float x) {
  const uint32_t word = bits_of_float(x), sign = (word >> 16) & 0x8000, rest = word & 0x7FFFFFFF;
  if (rest > 0x7F800000) return uint16_t(sign | 0x7E00 | ((rest >> 13) & 1023));
  if (rest >= 0x477FF000) return uint16_t(sign | 0x7C00);
  if (rest < 0x38800000) {  // a subnormal half: adding 0.5 leaves its bits at the end of the sum
    return uint16_t(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3F000000));
  }
  return uint16_t(sign | ((rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13));
}

inline F8 spread(float x) { BATON_EACH(F8, 8, x); }
inline F8 zero() { return spread(0.0f); }
inline F8 load(const float* p) { BATON_EACH(F8, 8, p[i]); }
inline void store(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F8 spread_at(const float* p) { return spread(*p); }
inline F8 add(F8 a, F8 b) { BATON_EACH(F8, 8, a.v[i] + b.v[i]); }
inline F8 sub(F8 a, F8 b) { BATON_EACH(F8, 8, a.v[i] - b.v[i]); }
inline F8 mul(F8 a, F8 b) { BATON_EACH(F8, 8, a.v[i] * b.v[i]); }
inline F8 div(F8 a, F8 b) { BATON_EACH(F8, 8, a.v[i] / b.v[i]); }
inline F8 fma(F8 a, F8 b, F8 c) { BATON_EACH(F8, 8, std::fma(a.v[i], b.v[i], c.v[i])); }
inline F8 larger(F8 a, F8 b) { BATON_EACH(F8, 8, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F8 smaller(F8 a, F8 b) { BATON_EACH(F8, 8, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F8 halves(const uint16_t* p) { BATON_EACH(F8, 8, half_to_float(p[i])); }
inline void store_halves(uint16_t* p, F8 a) {
  for (int i = 0; i < 8; i++) p[i] = float_to_half(a.v[i]);
}

// Integers wrap, as the vector instructions do.
inline int32_t wrapped(uint32_t x) { return int32_t(x); }
inline I8 ispread(int32_t x) { BATON_EACH(I8, 8, x); }
inline I8 ispread_at(const int32_t* p) { return ispread(*p); }
inline I8 izero() { return ispread(0); }
inline I8 iadd(I8 a, I8 b) { BATON_EACH(I8, 8, wrapped(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
inline I8 isub(I8 a, I8 b) { BATON_EACH(I8, 8, wrapped(uint32_t(a.v[i]) - uint32_t(b.v[i]))); }
template <int BITS>
inline I8 shift_left(I8 a) {
  BATON_EACH(I8, 8, wrapped(uint32_t(a.v[i]) << BITS));
}
inline I8 iload(const int32_t* p) { BATON_EACH(I8, 8, p[i]); }
inline void istore(int32_t* p, I8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F8 to_float(I8 a) { BATON_EACH(F8, 8, float(a.v[i])); }
inline I8 bits(F8 a) { BATON_EACH(I8, 8, int32_t(bits_of_float(a.v[i]))); }
inline F8 as_float(I8 a) { BATON_EACH(F8, 8, float_of_bits(uint32_t(a.v[i]))); }

inline B32 load_bytes(const uint8_t* p) { BATON_EACH(B32, 32, p[i]); }
inline B32 low_nibbles(B32 a) { BATON_EACH(B32, 32, uint8_t(a.v[i] & 15)); }
inline B32 high_nibbles(B32 a) { BATON_EACH(B32, 32, uint8_t(a.v[i] >> 4)); }
inline S16 dot_pairs(B32 w, const int8_t* four) {
  BATON_EACH(S16, 16, int16_t(w.v[2 * i] * four[(2 * i) & 3] + w.v[2 * i + 1] * four[(2 * i + 1) & 3]));
}
inline S16 add16(S16 a, S16 b) { BATON_EACH(S16, 16, int16_t(a.v[i] + b.v[i])); }
template <int FACTOR>
inline I8 fold_pairs(S16 a) {
  BATON_EACH(I8, 8, FACTOR * (int32_t(a.v[2 * i]) + int32_t(a.v[2 * i + 1])));
}

inline float tree_sum(const float* v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}
inline void sums_of_four(F8 a, F8 b, F8 c, F8 d, float* out) {
  out[0] = tree_sum(a.v);
  out[1] = tree_sum(b.v);
  out[2] = tree_sum(c.v);
  out[3] = tree_sum(d.v);
}

inline void transpose(F8 r[8]) {
  for (int i = 0; i < 8; i++) {
    for (int j = 0; j < i; j++) {
      const float kept = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = kept;
    }
  }
}

inline void store_bytes(int8_t* p, I8 a, I8 b, I8 c, I8 d) {
  const I8* all[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 32; i++) {
    const int32_t x = all[i / 8]->v[i % 8];
    p[i] = int8_t(x > 127 ? 127 : x < -128 ? -128 : x);
  }
}

inline I8 largest_bits(I8 a, F8 x) {
  I8 r;
  for (int i = 0; i < 8; i++) {
    const uint32_t word = bits_of_float(x.v[i]) & 0x7FFFFFFF;
    r.v[i] = int32_t(word > uint32_t(a.v[i]) ? word : uint32_t(a.v[i]));
  }
  return r;
}

#undef BATON_EACH
