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
      team_(threads),
      taken_(new std::atomic<int32_t>[size_t(shape.layers)]) {
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
  return next == step.rows;
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
  for (int i = 0; i < shape_.layers; i++) taken_[size_t(i)].store(0, std::memory_order_relaxed);
}

int Executor::step(const Step& step) {
  if (!valid(step)) return -1;
  prepare(step);
  team_.run([](void* self, int thread) { static_cast<Executor*>(self)->walk(thread); }, this);
  return 0;
}

void Executor::walk(int thread) {
  auto before = std::chrono::steady_clock::now();
  for (size_t i = 0; i < ops_.size(); i++) {
    const Op& op = ops_[i];
    if (op.code == EMBED) embed(op, thread);
    if (op.code == PROJECT) project(op, thread);
    if (op.code == ATTEND) attend(op, thread);
    if (seconds_ && thread == 0) {
      const auto now = std::chrono::steady_clock::now();
      seconds_[i] += std::chrono::duration<double>(now - before).count();
      before = now;
    }
  }
}

void Executor::embed(const Op& op, int thread) {
  for (int row = from(step_->rows, thread); row < from(step_->rows, thread + 1); row++) {
    unpack_row(op.part[0], step_->ids[row], hidden_.get() + int64_t(row) * hidden_stride_);
  }
  team_.barrier();
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

void Executor::project(const Op& op, int thread) {
  const Step& step = *step_;
  const int rows = op.sampled_only ? step.sampled : step.rows, groups = op.part[0].groups;
  if (!rows) return;
  Scratch& own = *scratch_[size_t(thread)];
  const bool alone = rows <= FEW;
  const Quantised input = alone ? own.quantised.view() : quantised_.view();
  for (int i = alone ? 0 : from(rows, thread); i < (alone ? rows : from(rows, thread + 1)); i++) {
    const int row = op.sampled_only ? step.sampled_rows[i] : i;
    quantise_row(source_row(op, row, own.row.get()), input, i, rows, groups);
  }
  if (!alone) team_.barrier();

  Output output{wide_.get(), wide_stride_, op.sampled_only ? step.sampled_rows : nullptr, false};
  if (op.target == ADD_TO_HIDDEN) {
    output = {hidden_.get(), hidden_stride_, output.rows, true};
  } else if (op.target == TO_LOGITS) {
    output = {step.logits, step.logits_stride, nullptr, false};
  }
  int total = 0;
  for (int i = 0; i < op.parts; i++) total += panels(op.part[i]);
  int first = from(total, thread), last = from(total, thread + 1);
  for (int i = 0; i < op.parts && last > 0; i++) {
    const int here = panels(op.part[i]);
    if (first < here) linear(op.part[i], first, last < here ? last : here, input, rows, output);
    first = first > here ? first - here : 0;
    last -= here;
  }
  team_.barrier();
}

void Executor::attend(const Op& op, int thread) {
  const Pages pages{step_->pool,
                    step_->block_bytes,
                    shape_.kv_heads,
                    std::countr_zero(uint32_t(shape_.block_size)),
                    shape_.head_dim,
                    op.layer};
  if (chunks_) {
    write_chunks(pages, thread);
    team_.barrier();
  }
  Scratch& scratch = *scratch_[size_t(thread)];
  std::atomic<int32_t>& taken = taken_[size_t(op.layer)];
  for (;;) {
    const int number = taken.fetch_add(1, std::memory_order_relaxed);
    if (number >= int(items_.size())) break;
    const Item& item = items_[size_t(number)];
    if (item.rows) {
      attend_chunk(pages, item, scratch);
    } else {
      attend_single(pages, item, scratch);
    }
  }
  team_.barrier();
}

// Queries of one KV head, turned and scaled: [group, head_dim].
void Executor::turned_queries(int row, int position, int head, float* out) const {
  const int dim = shape_.head_dim, half = dim / 2;
  const float* queries = wide_.get() + int64_t(row) * wide_stride_ + head * group() * dim;
  const float *cos = step_->cos + int64_t(position) * half, *sin = step_->sin + int64_t(position) * half;
  const float scale = 1.0f / std::sqrt(float(dim));
  for (int i = 0; i < group(); i++) rotate(queries + i * dim, cos, sin, scale, dim, out + i * dim);
}

// The item with the last split also writes the token's own key and value: nobody else reads them in this step.
void Executor::attend_single(const Pages& pages, const Item& item, Scratch& scratch) {
  const Span& span = step_->span[item.span];
  const int dim = shape_.head_dim, position = span.start, size = record_size(dim);
  if (position < item.first + SPLIT) {
    const float* key = wide_.get() + int64_t(span.row) * wide_stride_ + (shape_.heads + item.head) * dim;
    write_kv(pages, step_->tables + span.table, position, item.head, key,
             key + shape_.kv_heads * dim, step_->cos + int64_t(position) * (dim / 2),
             step_->sin + int64_t(position) * (dim / 2), scratch.row.get());
  }
  turned_queries(span.row, position, item.head, scratch.queries.get());
  const int n = position + 1 - item.first < SPLIT ? position + 1 - item.first : SPLIT;
  const bool only = splits_[size_t(span.row)] == 1;
  float* records = scratch.records.get();
  if (!only) {
    records = records_.get() + record_[size_t(span.row)] +
              (int64_t(item.first / SPLIT) * shape_.heads + item.head * group()) * size;
  }
  attend_split(pages, step_->tables + span.table, item.head, item.first, n, group(), scratch.queries.get(),
               scratch.scores.get(), records);
  if (!only) return;
  float* out = attended_.get() + int64_t(span.row) * attended_stride_ + item.head * group() * dim;
  for (int i = 0; i < group(); i++) finish(records + i * size, dim, out + i * dim);
}

void Executor::write_chunks(const Pages& pages, int thread) {
  const int dim = shape_.head_dim, half = dim / 2;
  const int begin = from(step_->rows, thread), end = from(step_->rows, thread + 1);
  float* scratch = scratch_[size_t(thread)]->row.get();
  for (int i = 0; i < step_->spans; i++) {
    const Span& span = step_->span[i];
    if (span.length == 1) continue;
    const int first = span.row > begin ? span.row : begin;
    const int last = span.row + span.length < end ? span.row + span.length : end;
    for (int row = first; row < last; row++) {
      const int position = span.start + row - span.row;
      const float* keys = wide_.get() + int64_t(row) * wide_stride_ + shape_.heads * dim;
      for (int head = 0; head < shape_.kv_heads; head++) {
        write_kv(pages, step_->tables + span.table, position, head, keys + head * dim,
                 keys + (shape_.kv_heads + head) * dim, step_->cos + int64_t(position) * half,
                 step_->sin + int64_t(position) * half, scratch);
      }
    }
  }
}

void Executor::attend_chunk(const Pages& pages, const Item& item, Scratch& scratch) {
  const Span& span = step_->span[item.span];
  const int dim = shape_.head_dim, size = record_size(dim), count = item.rows * group();
  const int row = span.row + item.first, position = span.start + item.first;
  const ChunkScratch chunk{scratch.queries.get(), scratch.scores.get(),  scratch.keys.get(),
                           scratch.values.get(),  scratch.records.get(), scratch.fresh.get()};
  for (int i = 0; i < item.rows; i++) {
    turned_queries(row + i, position + i, item.head, chunk.queries + i * group() * dim);
  }
  for (int i = count * dim; i < padded(count, 4) * dim; i++) chunk.queries[i] = 0.0f;
  attend_tile(pages, step_->tables + span.table, item.head, position, item.rows, group(), chunk);
  for (int i = 0; i < count; i++) {
    float* out = attended_.get() + int64_t(row + i / group()) * attended_stride_ +
                 (item.head * group() + i % group()) * dim;
    finish(chunk.records + i * size, dim, out);
  }
}

}  // namespace baton

#define BATON_EXPORT extern "C" __attribute__((visibility("default")))

// Null when there is no memory or no thread to be had.
BATON_EXPORT void* baton_create(const baton::Shape* shape, const baton::Op* ops, int32_t count, int32_t threads) {
  try {
    return new baton::Executor(*shape, ops, count, threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

BATON_EXPORT void baton_destroy(void* executor) { delete static_cast<baton::Executor*>(executor); }

// 0; -1: the step names what does not exist; -2: no memory.
BATON_EXPORT int32_t baton_step(void* executor, const baton::Step* step) {
  try {
    return static_cast<baton::Executor*>(executor)->step(*step);
  } catch (const std::bad_alloc&) {
    return -2;
  }
}

BATON_EXPORT void baton_profile(void* executor, double* seconds) {
  static_cast<baton::Executor*>(executor)->profile(seconds);
}
