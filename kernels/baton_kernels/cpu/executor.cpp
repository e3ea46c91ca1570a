#include "executor.h"

namespace baton {

namespace {

int most_groups(const Op* ops, int count) {
  int most = 0;
  for (int i = 0; i < count; i++) most = ops[i].part[0].groups > most ? ops[i].part[0].groups : most;
  return most;
}

int wide_stride(const Shape& shape) {
  const int attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  const int gated = 2 * padded(shape.ffn, LANES);
  return padded(attention > gated ? attention : gated, 16) + 16;  // not a power of two: cache sets
}

}  // namespace

Executor::Executor(const Shape& shape, const Op* ops, int count, int threads)
    : shape_(shape),
      ops_(ops, ops + count),
      hidden_stride_(padded(shape.hidden, GROUP)),
      wide_stride_(wide_stride(shape)),
      attended_stride_(padded(shape.heads * shape.head_dim, GROUP)),
      most_groups_(most_groups(ops, count)),
      tile_rows_(group() <= 4 ? 16 : group() < 64 ? 64 / group() : 1),
      team_(threads, 2 * count + 1) {
  const int queries = padded(tile_rows_ * group(), 4), dim = shape.head_dim;
  for (int i = 0; i < threads; i++) {
    auto made = std::make_unique<Scratch>();
    made->row.reserve(int64_t(most_groups_) * GROUP + LANES);
    made->queries.reserve(int64_t(queries) * dim);
    made->scores.reserve(int64_t(queries) * SPLIT);
    made->keys.reserve(int64_t(SPLIT) * dim);
    made->values.reserve(int64_t(SPLIT) * dim);
    made->records.reserve(int64_t(queries) * record_size(dim));
    made->fresh.reserve(int64_t(queries) * record_size(dim));
    made->quantised.reserve(FEW, most_groups_);
    scratch_.push_back(std::move(made));
  }
}

bool Executor::valid(const Step& step) const {
  if (step.rows < 1 || step.spans < 1 || step.sampled < 0) return false;
  int next = 0;
  for (int i = 0; i < step.spans; i++) {
    const Span& span = step.span[i];
    if (span.row != next || span.length < 1 || span.start < 0) return false;
    next += span.length;
    const int used = (span.start + span.length + shape_.block_size - 1) / shape_.block_size;
    for (int k = 0; k < used; k++) {
      const int32_t slot = step.tables[span.table + k];
      if (slot < 0 || slot >= step.blocks) return false;
    }
  }
  for (int i = 0; i < step.rows; i++) {
    if (step.ids[i] < 0 || step.ids[i] >= shape_.vocab) return false;
  }
  for (int i = 0; i < step.sampled; i++) {
    if (step.sampled_rows[i] < 0 || step.sampled_rows[i] >= step.rows) return false;
  }
  return next == step.rows && valid_choices(step);
}

bool Executor::valid_choices(const Step& step) const {
  const auto in_range = [&](const auto* ids, int count) {
    return std::all_of(ids, ids + count, [&](auto id) { return id >= 0 && id < step.choosable; });
  };
  if (!step.choices) return true;
  if (step.choosable < 1 || step.choosable > step.logits_stride) return false;
  for (int i = 0; i < step.sampled; i++) {
    const Choice& each = step.choices[i];
    if (each.logprobs > step.tops || !in_range(each.bias_ids, each.biases)) return false;
    if (!in_range(each.masked_ids, each.masked) || !in_range(each.seen_ids, each.seen)) return false;
  }
  return true;
}

// Makes room, and lists attention's items: tiles first, the last and longest of them foremost.
void Executor::prepare(const Step& step) {
  step_ = &step;
  hidden_.reserve(int64_t(step.rows) * hidden_stride_);
  wide_.reserve(int64_t(step.rows) * wide_stride_);
  attended_.reserve(int64_t(step.rows) * attended_stride_);
  quantised_.reserve(step.rows, most_groups_);
  splits_.assign(size_t(step.rows), 1);
  record_.assign(size_t(step.rows), 0);
  items_.clear();
  chunks_ = false;
  int64_t records = 0;
  for (int i = 0; i < step.spans; i++) {
    const Span& span = step.span[i];
    if (span.length == 1) continue;
    chunks_ = true;
    for (int first = (span.length - 1) / tile_rows_ * tile_rows_; first >= 0; first -= tile_rows_) {
      const int rows = span.length - first < tile_rows_ ? span.length - first : tile_rows_;
      for (int head = 0; head < shape_.kv_heads; head++) items_.push_back({i, head, first, rows});
    }
  }
  for (int i = 0; i < step.spans; i++) {
    const Span& span = step.span[i];
    if (span.length != 1) continue;
    const int splits = span.start / SPLIT + 1;
    splits_[size_t(span.row)] = splits;
    record_[size_t(span.row)] = records;
    if (splits > 1) records += int64_t(splits) * shape_.heads * record_size(shape_.head_dim);
    for (int split = 0; split < splits; split++) {
      for (int head = 0; head < shape_.kv_heads; head++) items_.push_back({i, head, split * SPLIT, 0});
    }
  }
  records_.reserve(records);
}

int Executor::step(const Step& step) {
  if (!valid(step)) return -1;
  prepare(step);
  cores_.work();
  team_.run(allowed(), [](void* self, int thread) { static_cast<Executor*>(self)->walk(thread); }, this);
  cores_.rest();
  return 0;
}

int Executor::choose(const Step& step) {
  if (!step.choices || step.sampled < 0 || !valid_choices(step)) return -1;
  step_ = &step;
  const auto work = [](void* self, int thread) {
    Executor& executor = *static_cast<Executor*>(self);
    Scratch& own = *executor.scratch_[size_t(thread)];
    own.phase = 0;
    executor.choose_tokens(own);
  };
  team_.run(std::min(step.sampled, allowed()), work, this);
  return 0;
}

void Executor::choose_tokens(Scratch& own) {
  const Step& step = *step_;
  team_.share(own.phase++, step.sampled, [&](int row) {
    if (step.choices[row].skipped) return;
    baton::choose(step.logits + row * step.logits_stride, step.choosable, step.choices[row], own.choice,
                  step.chosen + row, step.top_ids + int64_t(row) * step.tops, step.top + int64_t(row) * step.tops);
  });
}

void Executor::walk(int thread) {
  Scratch& own = *scratch_[size_t(thread)];
  own.phase = 0;
  auto before = std::chrono::steady_clock::now();
  for (size_t i = 0; i < ops_.size(); i++) {
    const Op& op = ops_[i];
    if (thread == 0) {
      cores_.work();
    } else if (thread >= allowed()) {
      return;  // until the next step
    }
    if (op.code == EMBED) embed(op, own);
    if (op.code == PROJECT) project(op, own);
    if (op.code == ATTEND) attend(op, own);
    if (seconds_ && thread == 0) {
      const auto now = std::chrono::steady_clock::now();
      seconds_[i] += std::chrono::duration<double>(now - before).count();
      before = now;
    }
  }
  if (step_->choices) choose_tokens(own);
}

void Executor::embed(const Op& op, Scratch& own) {
  share_rows(own, step_->rows, SOME_ROWS, [&](int first, int last) {
    for (int row = first; row < last; row++) {
      unpack_row(op.part[0], step_->ids[row], hidden_.get() + int64_t(row) * hidden_stride_);
    }
  });
}

const float* Executor::source_row(const Op& op, int row, float* scratch) {
  if (op.source == NORMED) {
    norm_row(hidden_.get() + int64_t(row) * hidden_stride_, op.norm, shape_.hidden, shape_.eps, scratch);
    return scratch;
  }
  if (op.source == GATED) {
    gate_row(wide_.get() + int64_t(row) * wide_stride_, shape_.ffn, scratch);
    return scratch;
  }
  const int splits = splits_[size_t(row)];
  if (splits == 1) return attended_.get() + int64_t(row) * attended_stride_;
  merge_row(records_.get() + record_[size_t(row)], splits, shape_.heads, shape_.head_dim, scratch);
  return scratch;
}

void Executor::project(const Op& op, Scratch& own) {
  const int rows = op.sampled_only ? step_->sampled : step_->rows, groups = op.part[0].groups;
  if (!rows) return;
  bool alone = rows <= FEW;
  const Quantised input = alone ? own.quantised.view() : quantised_.view();
  const auto prepare_rows = [&](int first, int last) {
    for (int i = first; i < last; i++) {
      const int row = op.sampled_only ? step_->sampled_rows[i] : i;
      quantise_row(source_row(op, row, own.row.get()), input, i, rows, groups);
    }
  };
  if (!alone) share_rows(own, rows, PREPARED_ROWS, prepare_rows);
  int total = 0;
  for (int i = 0; i < op.parts; i++) total += panels(op.part[i]);
  share_rows(own, total, panels_a_piece(total, groups, rows), [&](int first, int last) {
    if (alone) prepare_rows(0, rows);  // only once a piece is taken: the source stands still until it is done
    alone = false;
    multiply(op, input, rows, first, last);
  });
}

// A piece of a linear layer: some microseconds of work, and enough pieces for the threads to end together.
int Executor::panels_a_piece(int total, int groups, int rows) const {
  constexpr int PIECES = 6, TILES = 6000;  // of each thread; of a piece, counting a tile once a row
  const int even = total / (PIECES * team_.size()), most = TILES / (groups * (rows + 3));
  const int fewer = even < most ? even : most;
  return team_.size() == 1 ? total : fewer > 1 ? fewer : 1;
}

// Panels `first` to `last` of all parts, one after the other.
void Executor::multiply(const Op& op, const Quantised& input, int rows, int first, int last) const {
  Output output{wide_.get(), wide_stride_, op.sampled_only ? step_->sampled_rows : nullptr, false};
  if (op.target == ADD_TO_HIDDEN) {
    output = {hidden_.get(), hidden_stride_, output.rows, true};
  } else if (op.target == TO_LOGITS) {
    output = {step_->logits, step_->logits_stride, nullptr, false};
  }
  for (int i = 0; i < op.parts && last > 0; i++) {
    const int here = panels(op.part[i]);
    if (first < here) linear(op.part[i], first, last < here ? last : here, input, rows, output);
    first = first > here ? first - here : 0;
    last -= here;
  }
}

}  // namespace baton
