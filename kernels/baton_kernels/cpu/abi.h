// What Python hands over (abi.py has the same structs for ctypes), and the functions it calls.
#pragma once

#include "choice.h"
#include "tiles.h"

namespace baton {

enum Code : int32_t { EMBED = 0, PROJECT = 1, ATTEND = 2 };
enum Source : int32_t { NORMED = 0, ATTENDED = 1, GATED = 2 };
enum Target : int32_t { TO_WIDE = 0, ADD_TO_HIDDEN = 1, TO_LOGITS = 2 };

constexpr int MAX_PARTS = 3;

// One operation of the prepared list.
//   EMBED    part[0]: rows of token ids into the hidden state
//   PROJECT  source rows, quantised, times each part; a part's results start at its column of the target
//   ATTEND   writes K and V of `wide` (queries, keys, values) to their pages, attends
struct Op {
  int32_t code, source, target, layer;
  int32_t sampled_only;  // only rows whose logits are wanted
  int32_t parts;
  const float* norm;  // [32 * groups], zeros past the real values; for NORMED
  Packed part[MAX_PARTS];
};

struct Shape {
  int32_t hidden, heads, kv_heads, head_dim, ffn, layers, block_size;
  int32_t vocab;  // rows of the embedding
  float eps;
};

// Consecutive rows of a step that belong to one sequence.
struct Span {
  int32_t row, length, start;
  int32_t table;  // where its pool slots begin in `tables`
};

struct Step {
  int32_t rows, spans, sampled, blocks;  // blocks: of the pool
  const int32_t* ids;                    // [rows]
  const Span* span;
  const int32_t* tables;
  const int32_t* sampled_rows;  // [sampled]
  const float* cos;             // [positions, head_dim / 2]
  const float* sin;
  float* logits;  // [sampled, logits_stride]
  int64_t logits_stride;
  uint8_t* pool;
  int64_t block_bytes;
  const Choice* choices;  // [sampled]: tokens are chosen, which spoils the logits; null: they are not
  Chosen* chosen;         // [sampled]
  int32_t* top_ids;       // [sampled, tops]
  double* top;            // [sampled, tops]
  int32_t tops;
  int32_t choosable;  // ids from here on are padding
};

}  // namespace baton
