// A team of threads that works through the same phases together.
//
// A phase is a number of pieces, and whoever is free takes the next one. It is over when all its pieces are
// done, not when all threads have come: a thread that the system has put aside, or that joins late, holds up
// nobody as long as it holds no piece. Who waits spins for at most 20 us, then sleeps (a futex on Linux): workers
// share the machine's cores, and a thread that spins on keeps the one it waits for off its core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace baton {

inline void relax() {
#ifdef __x86_64__
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Returns when done(value) holds. Whoever makes it hold calls notify_all afterwards.
template <class T, class Done>
void wait_until(const std::atomic<T>& value, Done done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  do {
    for (int i = 0; i < 32; i++) {
      if (done(value.load(std::memory_order_acquire))) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  for (T seen = value.load(); !done(seen); seen = value.load()) value.wait(seen);
}

// One phase of a run.
struct alignas(64) Phase {
  std::atomic<int32_t> taken{0}, done{0};
};

class Team {
 public:
  using Work = void (*)(void*, int);

  // phases: the most that a run has.
  Team(int threads, int phases) : size_(threads), count_(phases), phases_(new Phase[size_t(phases)]) {
    for (int number = 1; number < threads; number++) {
      helpers_.emplace_back([this, number] { help(number); });
    }
  }

  ~Team() {
    ending_ = true;
    call();
    for (auto& helper : helpers_) helper.join();
  }

  int size() const { return size_; }

  // Runs work(argument, number) in the caller as number 0 and in up to `threads` - 1 helpers; returns when all
  // have left it. Every one of them goes through the same phases, from 0 on, unless it leaves before the end.
  void run(int threads, Work work, void* argument) {
    for (int i = 0; i < count_; i++) {
      phases_[size_t(i)].taken.store(0, std::memory_order_relaxed);
      phases_[size_t(i)].done.store(0, std::memory_order_relaxed);
    }
    work_ = work;
    argument_ = argument;
    wanted_ = threads;
    if (threads > 1 && size_ > 1) {
      open_ = true;
      call();
    }
    work(argument, 0);
    open_ = false;
    wait_until(inside_, [](int32_t inside) { return inside == 0; });
  }

  // Inside work: takes part in phase `number`, of `pieces`, by piece(0), piece(1), ...; returns when all are done.
  template <class Piece>
  void share(int number, int pieces, Piece piece) {
    Phase& phase = phases_[size_t(number)];
    while (phase.taken.load(std::memory_order_relaxed) < pieces) {
      const int taken = phase.taken.fetch_add(1, std::memory_order_relaxed);
      if (taken >= pieces) break;
      piece(taken);
      if (phase.done.fetch_add(1) + 1 == pieces) {  // sequentially consistent: to see whoever sleeps already
        phase.done.notify_all();
        return;
      }
    }
    wait_until(phase.done, [pieces](int32_t done) { return done >= pieces; });
  }

 private:
  void call() {
    calls_.fetch_add(1);
    calls_.notify_all();
  }

  void help(int number) {
    for (uint32_t seen = 0;;) {
      wait_until(calls_, [seen](uint32_t calls) { return calls != seen; });
      seen = calls_.load();
      if (ending_) return;
      inside_.fetch_add(1);
      if (open_ && number < wanted_) work_(argument_, number);
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  const int size_, count_;
  std::unique_ptr<Phase[]> phases_;
  Work work_ = nullptr;
  void* argument_ = nullptr;
  int wanted_ = 0;
  alignas(64) std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<int32_t> inside_{0};
  std::atomic<bool> open_{false}, ending_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace baton
