// The machine's cores, shared by the workers on it: a ledger in shared memory that all of them map.
//
// Each worker has a seat with the number of cores it owns, and marks until when it is busy. A busy worker uses its
// own cores and those of idle ones, which the busy ones share; it looks again at every operation, so that whoever
// wakes up has its own back at once. A worker that died in a step is idle when its mark has passed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace baton {

struct alignas(64) Seat {
  std::atomic<int64_t> busy_until;  // ns of the monotonic clock
  std::atomic<int32_t> cores;       // owned; 0: nobody sits here
  int32_t pid;                      // Python's
};

struct Ledger {
  alignas(64) std::atomic<int32_t> seats;  // so many have ever been taken
  Seat seat[63];
};

class Cores {
 public:
  // `seat` is ours.
  void join(Ledger* ledger, int seat) {
    ledger_ = ledger;
    mine_ = seat;
  }

  // A step is being worked on; call it often enough.
  void work() {
    if (!ledger_) return;
    const int64_t now = clock();
    if (now + HELD / 2 > marked_) mark(now + HELD);
  }

  // The step is over. For a moment the cores stay ours: another step mostly follows.
  void rest() {
    if (ledger_) mark(clock() + LINGER);
  }

  // How many threads may work on our step now, of `most`.
  int allowed(int most) const {
    if (!ledger_) return most;
    const int64_t now = clock();
    const int seats = ledger_->seats.load(std::memory_order_relaxed);
    int idle = 0, busy = 1, rank = 0;
    for (int i = 0; i < seats; i++) {
      if (i == mine_) continue;
      const int cores = ledger_->seat[i].cores.load(std::memory_order_relaxed);
      if (!cores) continue;
      if (ledger_->seat[i].busy_until.load(std::memory_order_relaxed) > now) {
        busy++;
        rank += i < mine_;
      } else {
        idle += cores;
      }
    }
    const int borrowed = idle / busy + (rank < idle % busy);
    const int cores = ledger_->seat[mine_].cores.load(std::memory_order_relaxed) + borrowed;
    return cores < most ? cores : most;
  }

 private:
  static constexpr int64_t HELD = 50'000'000, LINGER = 3'000'000;  // ns

  static int64_t clock() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  void mark(int64_t until) {
    marked_ = until;
    ledger_->seat[mine_].busy_until.store(until, std::memory_order_relaxed);
  }

  Ledger* ledger_ = nullptr;
  int mine_ = 0;
  int64_t marked_ = 0;
};

}  // namespace baton
