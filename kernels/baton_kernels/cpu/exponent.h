// exp in float64, for sampling: plain loops that compilers turn into vectors, the same bits either way.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace baton {

// exp(x) for x <= 0, relative error 1e-14; 0 below -700, and for minus infinity.
inline double exp_below(double x) {
  constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52: the low bits of a sum with it are an integer
  const double held = x > -700.0 ? x : -700.0;
  const double turned = std::fma(held, 1.4426950408889634, ROUND);
  const double n = turned - ROUND;
  double r = std::fma(n, -0.6931471803691238, held);
  r = std::fma(n, -1.9082149292705877e-10, r);
  double p = 1.0 / 39916800.0;
  p = std::fma(p, r, 1.0 / 3628800.0);
  p = std::fma(p, r, 1.0 / 362880.0);
  p = std::fma(p, r, 1.0 / 40320.0);
  p = std::fma(p, r, 1.0 / 5040.0);
  p = std::fma(p, r, 1.0 / 720.0);
  p = std::fma(p, r, 1.0 / 120.0);
  p = std::fma(p, r, 1.0 / 24.0);
  p = std::fma(p, r, 1.0 / 6.0);
  p = std::fma(p, r, 0.5);
  p = std::fma(p, r, 1.0);
  p = std::fma(p, r, 1.0);
  const int64_t exponent = (std::bit_cast<int64_t>(turned) - std::bit_cast<int64_t>(ROUND) + 1023) << 52;
  return x > -700.0 ? p * std::bit_cast<double>(exponent) : 0.0;
}

// Weights exp((score - peak) / temperature) of n scores.
inline void weigh(const float* scores, int n, double peak, double inverse, double* out) {
  for (int i = 0; i < n; i++) out[i] = exp_below((double(scores[i]) - peak) * inverse);
}

// Their sum in eight lanes, for whole multiples of 8.
inline double sum_of(const double* x, int n) {
  double sums[8] = {};
  for (int i = 0; i < n; i += 8) {
    for (int k = 0; k < 8; k++) sums[k] += x[i + k];
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace baton
