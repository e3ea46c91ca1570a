// A team of threads that works through the same function together and meets at barriers.
//
// Who waits spins for at most 20 us, then sleeps (a futex on Linux): workers share the machine's cores, and a
// thread that spins on keeps the one it waits for off its core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
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

inline void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  do {
    for (int i = 0; i < 32; i++) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class Team {
 public:
  using Work = void (*)(void*, int);

  explicit Team(int threads) : size_(threads) {
    for (int number = 1; number < threads; number++) {
      helpers_.emplace_back([this, number] { help(number); });
    }
  }

  ~Team() {
    work_ = nullptr;
    call();
    for (auto& helper : helpers_) helper.join();
  }

  int size() const { return size_; }

  // Runs work(argument, number) in every thread, in the caller as number 0; returns when all are done.
  void run(Work work, void* argument) {
    work_ = work;
    argument_ = argument;
    call();
    work(argument, 0);
    barrier();
  }

  // Inside work: returns when all threads have come here.
  void barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1);  // sequentially consistent: notify must see whoever sleeps already
      phase_.notify_all();
    } else {
      wait_while(phase_, phase);
    }
  }

 private:
  void call() {
    if (size_ == 1) return;
    calls_.fetch_add(1);
    calls_.notify_all();
  }

  void help(int number) {
    for (uint32_t seen = 0;; seen++) {
      wait_while(calls_, seen);
      if (!work_) return;
      work_(argument_, number);
      barrier();
    }
  }

  const int size_;
  Work work_ = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::vector<std::thread> helpers_;
};

}  // namespace baton
