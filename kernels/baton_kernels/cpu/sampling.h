// Logits to a token, without a full sort: the rules of baton/engine/sampling.py, which has the words for them.
//
// A pass finds the largest score of each block of 64; what a filter cannot keep is then passed over by blocks.
#pragma once

#include "choice.h"

namespace baton {

constexpr int SCORE_BLOCK = 64;  // scores with one maximum
constexpr int DRAW_BLOCK = 256;  // weights summed together

// The largest score of each block, and of all. False if there is a NaN, or no finite maximum.
inline bool find_maxima(const float* scores, int n, std::vector<float>& maxima, float* peak) {
  maxima.resize(size_t((n + SCORE_BLOCK - 1) / SCORE_BLOCK));
  I8 bits = izero();
  float most = -std::numeric_limits<float>::infinity();
  for (size_t block = 0; block < maxima.size(); block++) {
    const float* at = scores + block * SCORE_BLOCK;
    const int size = n - int(block) * SCORE_BLOCK < SCORE_BLOCK ? n - int(block) * SCORE_BLOCK : SCORE_BLOCK;
    F8 best = spread(-std::numeric_limits<float>::infinity());
    float padded[SCORE_BLOCK];
    if (size < SCORE_BLOCK) {
      for (int i = 0; i < SCORE_BLOCK; i++) padded[i] = i < size ? at[i] : -std::numeric_limits<float>::infinity();
      at = padded;
    }
    for (int i = 0; i < SCORE_BLOCK; i += LANES) {
      const F8 v = load(at + i);
      best = larger(best, v);
      bits = largest_bits(bits, v);
    }
    maxima[block] = lane_max(best);
    most = maxima[block] > most ? maxima[block] : most;
  }
  uint32_t words[8], word = 0;
  istore(reinterpret_cast<int32_t*>(words), bits);
  for (int i = 0; i < 8; i++) word = words[i] > word ? words[i] : word;
  *peak = most;
  return word <= 0x7F800000 && std::isfinite(most);
}

// The first id with a score of at least `edge`, which there is.
inline int first_from(const float* scores, const std::vector<float>& maxima, float edge) {
  int i = 0;
  while (maxima[size_t(i)] < edge) i++;
  for (i *= SCORE_BLOCK; scores[i] < edge; i++) {
  }
  return i;
}

// Candidates with a score of at least `edge`, in the order of their ids.
inline void collect(const float* scores, int n, const std::vector<float>& maxima, float edge,
                    std::vector<Candidate>& out) {
  out.clear();
  for (size_t block = 0; block < maxima.size(); block++) {
    if (maxima[block] < edge) continue;
    const int begin = int(block) * SCORE_BLOCK, end = n - begin < SCORE_BLOCK ? n : begin + SCORE_BLOCK;
    for (int i = begin; i < end; i++) {
      if (scores[i] >= edge) out.push_back({scores[i], i, 0.0});
    }
  }
}

// Keeps those candidates that are not after `last`.
inline void keep_until(std::vector<Candidate>& kept, const Candidate& last) {
  std::erase_if(kept, [&](const Candidate& each) { return before(last, each); });
}

// The k most likely candidates, k < n, in the order of their ids.
inline void top_k(const float* scores, int n, int k, ChoiceScratch& scratch) {
  std::vector<float>& sorted = scratch.scores;
  float edge = -std::numeric_limits<float>::infinity();
  if (k <= int(scratch.maxima.size())) {  // so many blocks have a score of at least this
    sorted.assign(scratch.maxima.begin(), scratch.maxima.end());
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
    edge = sorted[size_t(k - 1)];
  }
  collect(scores, n, scratch.maxima, edge, scratch.kept);
  if (int(scratch.kept.size()) > k) {
    scratch.ordered = scratch.kept;
    std::nth_element(scratch.ordered.begin(), scratch.ordered.begin() + (k - 1), scratch.ordered.end(), before);
    keep_until(scratch.kept, scratch.ordered[size_t(k - 1)]);
  }
}

inline double weigh(std::vector<Candidate>& kept, double peak, double inverse) {
  double total = 0.0;
  for (Candidate& each : kept) {
    each.weight = exp_below((double(each.score) - peak) * inverse);
    total += each.weight;
  }
  return total;
}

// Keeps the smallest set of the most likely candidates whose weights reach `goal`; at least one.
inline void nucleus(std::vector<Candidate>& kept, double goal, ChoiceScratch& scratch) {
  std::vector<Candidate>& all = scratch.ordered;
  all = kept;
  double sum = 0.0;
  auto begin = all.begin(), end = all.end();
  while (end - begin > 32) {  // halves: the border lies in the first if its sum reaches the goal
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    double half = 0.0;
    for (auto each = begin; each != middle; ++each) half += each->weight;
    if (sum + half >= goal) {
      end = middle;
    } else {
      sum += half;
      begin = middle;
    }
  }
  std::sort(begin, end, before);
  for (; begin + 1 < end; ++begin) {
    sum += begin->weight;
    if (sum >= goal) break;
  }
  keep_until(kept, *begin);
}

// The weights of all scores; the sum of them, and of each block of 256.
inline double weigh_all(const float* scores, int n, double peak, double inverse, ChoiceScratch& scratch) {
  double total = 0.0;
  scratch.sums.clear();
  scratch.weights.resize(size_t((n + DRAW_BLOCK - 1) / DRAW_BLOCK * DRAW_BLOCK));
  for (int begin = 0; begin < n; begin += DRAW_BLOCK) {
    const int size = n - begin < DRAW_BLOCK ? n - begin : DRAW_BLOCK;
    double* weights = scratch.weights.data() + begin;
    weigh(scores + begin, size, peak, inverse, weights);
    for (int i = size; i < DRAW_BLOCK; i++) weights[i] = 0.0;
    scratch.sums.push_back(sum_of(weights, DRAW_BLOCK));
    total += scratch.sums.back();
  }
  return total;
}

// The first index whose running sum exceeds `target`; where rounding left none, the last with weight. Takes
// from the target what lies before the index.
template <class Weight>
int first_beyond(int n, double* target, Weight weight) {
  double sum = 0.0, last_sum = 0.0;
  int last = 0;
  for (int i = 0; i < n; i++) {
    const double each = weight(i);
    if (each > 0.0) last = i, last_sum = sum;
    sum += each;
    if (sum > *target) break;
  }
  *target -= last_sum;
  return last;
}

// A draw among all scores, by the inverse of the running sum of their weights.
inline int draw_of_all(double target, const ChoiceScratch& scratch) {
  const int blocks = int(scratch.sums.size());
  const int begin = DRAW_BLOCK * first_beyond(blocks, &target, [&](int i) { return scratch.sums[size_t(i)]; });
  const double* weights = scratch.weights.data() + begin;
  return begin + first_beyond(DRAW_BLOCK, &target, [=](int i) { return weights[i]; });
}

// Chooses by temperature and filters.
inline int draw(const float* scores, int n, float peak, const Choice& choice, ChoiceScratch& scratch) {
  const double inverse = 1.0 / choice.temperature;
  std::vector<Candidate>& kept = scratch.kept;
  bool all = true;
  if (choice.top_k > 0 && choice.top_k < n) {
    top_k(scores, n, choice.top_k, scratch);
    all = false;
  }
  if (choice.log_min_p > -std::numeric_limits<double>::infinity()) {
    const double lowest = double(peak) + choice.temperature * choice.log_min_p;
    const float edge = float(lowest < double(peak) ? lowest : double(peak));
    if (all) collect(scores, n, scratch.maxima, edge, kept);
    std::erase_if(kept, [edge](const Candidate& each) { return each.score < edge; });
    all = false;
  }
  double total = 0.0;
  if (all) {
    total = weigh_all(scores, n, peak, inverse, scratch);
    if (choice.top_p >= 1.0) {
      return draw_of_all(choice.uniform * total, scratch);
    }
    // The nucleus lies among the scores so near to the peak that their weights reach its share.
    const double goal = choice.top_p * total;
    double reached = 0.0;
    for (double depth = 4.0; reached < goal && depth < 1024.0; depth *= 1.5) {
      collect(scores, n, scratch.maxima, float(double(peak) - depth * choice.temperature), kept);
      reached = 0.0;
      for (Candidate& each : kept) reached += each.weight = scratch.weights[size_t(each.id)];
    }
    nucleus(kept, goal, scratch);
  } else {
    total = weigh(kept, peak, inverse);
    if (choice.top_p < 1.0) nucleus(kept, choice.top_p * total, scratch);
  }
  total = 0.0;
  for (const Candidate& each : kept) total += each.weight;
  double target = choice.uniform * total;
  const int at = first_beyond(int(kept.size()), &target, [&](int i) { return kept[size_t(i)].weight; });
  return kept[size_t(at)].id;
}

// Bias, mask, penalties and grammar, in this order, on scores in place.
inline void adjust(float* scores, int n, const Choice& choice) {
  constexpr float never = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < choice.biases; i++) scores[choice.bias_ids[i]] += choice.bias[i];
  for (int i = 0; i < choice.masked; i++) scores[choice.masked_ids[i]] = never;
  for (int i = 0; i < choice.seen; i++) {
    float& score = scores[choice.seen_ids[i]];
    const float count = choice.seen_counts[i];
    if (choice.repetition != 1.0f) {
      score = score > 0.0f ? score / choice.repetition : score * choice.repetition;
    }
    score -= choice.frequency * count;
    score -= choice.presence * (count > 0.0f ? 1.0f : 0.0f);
  }
  if (!choice.allowed) return;
  for (int i = 0; i < n; i++) {
    const bool kept = i / 32 < choice.allowed_words && (choice.allowed[i / 32] >> (i % 32) & 1);
    if (!kept) scores[i] = never;
  }
}

// The most likely `count` of raw logits, and the logarithm of the sum of all exponentials.
inline double most_likely(const float* logits, int n, int count, float peak, ChoiceScratch& scratch) {
  const double norm = double(peak) + std::log(weigh_all(logits, n, peak, 1.0, scratch));
  scratch.ordered.clear();
  if (count > 0) {
    if (count < n) {
      top_k(logits, n, count, scratch);
    } else {
      collect(logits, n, scratch.maxima, -std::numeric_limits<float>::infinity(), scratch.kept);
    }
    scratch.ordered = scratch.kept;
    std::sort(scratch.ordered.begin(), scratch.ordered.end(), before);
  }
  return norm;
}

// One row: `logits` [n] are spoilt. `top_ids` and `top` have room for choice.logprobs.
inline void choose(float* logits, int n, const Choice& choice, ChoiceScratch& scratch, Chosen* chosen,
                   int32_t* top_ids, double* top) {
  *chosen = {-1, 0, 0.0};
  float peak = 0.0f;
  const bool changes = choice.biases || choice.masked || choice.seen || choice.allowed;
  if (changes && choice.logprobs < 0) adjust(logits, n, choice);
  if (!find_maxima(logits, n, scratch.maxima, &peak)) return;
  double norm = 0.0;
  std::vector<float> raw;
  if (choice.logprobs >= 0) {
    norm = most_likely(logits, n, choice.logprobs, peak, scratch);
    chosen->tops = int32_t(scratch.ordered.size());
    for (int i = 0; i < chosen->tops; i++) {
      top_ids[i] = scratch.ordered[size_t(i)].id;
      top[i] = double(scratch.ordered[size_t(i)].score) - norm;
    }
    if (changes) {
      raw.assign(logits, logits + n);
      adjust(logits, n, choice);
      if (!find_maxima(logits, n, scratch.maxima, &peak)) return;
    }
  }
  const int token = choice.temperature > 0.0 ? draw(logits, n, peak, choice, scratch)
                                             : first_from(logits, scratch.maxima, peak);
  chosen->token = token;
  if (choice.logprobs >= 0) chosen->logprob = double(raw.empty() ? logits[token] : raw[size_t(token)]) - norm;
}

}  // namespace baton
