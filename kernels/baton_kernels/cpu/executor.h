// Runs a step: every thread walks the same list of operations and takes its share of each.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "attention_chunk.h"
#include "attention_single.h"
#include "cores.h"
#include "linear.h"
#include "rows.h"
#include "sampling.h"
#include "team.h"

namespace baton {

// Memory that grows, aligned for vectors, zeroed when it is new.
template <class T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    if (count > count_) {
      data_.reset(static_cast<T*>(::operator new(size_t(count) * sizeof(T), std::align_val_t(64))));
      std::memset(data_.get(), 0, size_t(count) * sizeof(T));
      count_ = count;
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t count_ = 0;
};

class PlaneBuffer {
 public:
  void reserve(int64_t groups) {
    bytes_.reserve(groups * GROUP);
    scale_.reserve(groups);
    weighted_.reserve(groups);
    sum128_.reserve(groups);
  }
  Plane view() const { return {bytes_.get(), scale_.get(), weighted_.get(), sum128_.get()}; }

 private:
  Buffer<int8_t> bytes_;
  Buffer<float> scale_, weighted_;
  Buffer<int32_t> sum128_;
};

class QuantisedBuffer {
 public:
  void reserve(int64_t rows, int groups) {
    coarse_.reserve(rows * groups);
    fine_.reserve(rows * groups);
    fine_rows_.reserve(int64_t(row_blocks(int(rows))) * groups);
  }
  Quantised view() const { return {coarse_.view(), fine_.view(), fine_rows_.get()}; }

 private:
  PlaneBuffer coarse_, fine_;
  Buffer<uint64_t> fine_rows_;
};

class Executor {
 public:
  Executor(const Shape& shape, const Op* ops, int count, int threads);

  // 0, or -1 for a step that names tokens, rows or slots which do not exist; nothing is computed then.
  int step(const Step& step);

  // Only the choices of a step, out of logits that are there; 0, or -1 as above.
  int choose(const Step& step);

  // From now on cores are shared with the other workers of the machine.
  void join(Ledger* ledger, int seat) { cores_.join(ledger, seat); }

  // How many threads a step may use now.
  int allowed() const { return cores_.allowed(team_.size()); }

  // Seconds that thread 0 has spent in each operation, added up while `seconds` is set.
  void profile(double* seconds) { seconds_ = seconds; }

 private:
  // Rows up to this many are prepared by every thread for itself, which saves a phase.
  static constexpr int FEW = 2;
  // Rows of a piece, where rows are made: embedded, written to pages; prepared for a linear layer.
  static constexpr int SOME_ROWS = 16, PREPARED_ROWS = FINE_STEP;

  struct Scratch {
    Buffer<float> row, queries, scores, keys, values, records, fresh;
    QuantisedBuffer quantised;
    ChoiceScratch choice;
    int phase;  // the next one
  };

  // A share of attention: a single token's split for one KV head, or a tile of a chunk.
  struct Item {
    int32_t span, head, first, rows;  // single: first key of the split, rows 0; tile: first row, rows
  };

  bool valid(const Step& step) const;
  bool valid_choices(const Step& step) const;
  void prepare(const Step& step);
  void walk(int thread);
  void embed(const Op& op, Scratch& own);
  void project(const Op& op, Scratch& own);
  void multiply(const Op& op, const Quantised& input, int rows, int first, int last) const;
  int panels_a_piece(int total, int groups, int rows) const;
  void attend(const Op& op, Scratch& own);
  void choose_tokens(Scratch& own);
  void attend_single(const Pages& pages, const Item& item, Scratch& scratch);
  void attend_chunk(const Pages& pages, const Item& item, Scratch& scratch);
  void write_chunks(const Pages& pages, int begin, int end, float* scratch);
  const float* source_row(const Op& op, int row, float* scratch);
  void turned_queries(int row, int position, int head, float* out) const;

  // Work on rows 0 to `rows` in pieces: piece(first, last).
  template <class Piece>
  void share_rows(Scratch& own, int rows, int each, Piece piece) {
    team_.share(own.phase++, (rows + each - 1) / each, [&](int number) {
      const int first = number * each;
      piece(first, rows - first < each ? rows : first + each);
    });
  }
  int group() const { return shape_.heads / shape_.kv_heads; }

  const Shape shape_;
  const std::vector<Op> ops_;
  const int hidden_stride_, wide_stride_, attended_stride_, most_groups_, tile_rows_;
  Team team_;
  Cores cores_;

  const Step* step_ = nullptr;
  Buffer<float> hidden_, wide_, attended_, records_;
  QuantisedBuffer quantised_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<Item> items_;
  std::vector<int32_t> splits_;                    // of each row: 1, or how many records it has
  std::vector<int64_t> record_;                    // of each row: where these begin
  bool chunks_ = false;
  double* seconds_ = nullptr;
};

}  // namespace baton
