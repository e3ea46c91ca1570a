// Attention's part of a step.
#include "executor.h"

namespace baton {

void Executor::attend(const Op& op, Scratch& own) {
  const Pages pages{step_->pool,
                    step_->block_bytes,
                    shape_.kv_heads,
                    std::countr_zero(uint32_t(shape_.block_size)),
                    shape_.head_dim,
                    op.layer};
  if (chunks_) {
    share_rows(own, step_->rows, SOME_ROWS,
               [&](int first, int last) { write_chunks(pages, first, last, own.row.get()); });
  }
  team_.share(own.phase++, int(items_.size()), [&](int number) {
    const Item& item = items_[size_t(number)];
    if (item.rows) {
      attend_chunk(pages, item, own);
    } else {
      attend_single(pages, item, own);
    }
  });
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

// Of rows `begin` to `end`, those that belong to chunks.
void Executor::write_chunks(const Pages& pages, int begin, int end, float* scratch) {
  const int dim = shape_.head_dim, half = dim / 2;
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
