// What Python asks of sampling and hears back, and the order of candidates.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "exponent.h"
#include "simd.h"

namespace baton {

// How the token of one row of logits is chosen: the rules of baton/engine/sampling.py.
struct Choice {
  double temperature;  // 0: the most likely one
  double top_p;        // 1: off
  double log_min_p;    // minus infinity: off
  double uniform;      // the draw, in [0, 1)
  float repetition, presence, frequency;
  int32_t top_k;     // 0: off
  int32_t logprobs;  // -1: none; else of the token and of so many most likely ones
  int32_t biases, masked, seen;
  const int32_t* bias_ids;
  const float* bias;
  const int32_t* masked_ids;  // never chosen
  const int64_t* seen_ids;    // distinct tokens of prompt and output, for the penalties
  const float* seen_counts;   // how often each came in the output
  const uint32_t* allowed;    // a bit an id; null: all
  int32_t allowed_words;
  int32_t skipped;  // nothing is chosen here
};

// What was chosen. `top_ids` and `top` have room for the most that any row asks for.
struct Chosen {
  int32_t token;  // -1: the logits are not finite
  int32_t tops;
  double logprob;
};

struct Candidate {
  float score;
  int32_t id;
  double weight;
};

// The higher score first, and of equals the lower id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score > b.score : a.id < b.id;
}

// Room for one thread.
struct ChoiceScratch {
  std::vector<float> scores, maxima;
  std::vector<double> weights, sums;
  std::vector<Candidate> kept, ordered;
};

}  // namespace baton
