// What the library offers; library.py calls it.
#include "executor.h"
#include "measure.h"

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

// Chooses tokens out of the logits that a step has left; 0 or as above.
BATON_EXPORT int32_t baton_choose(void* executor, const baton::Step* step) {
  try {
    return static_cast<baton::Executor*>(executor)->choose(*step);
  } catch (const std::bad_alloc&) {
    return -2;
  }
}

BATON_EXPORT void baton_join(void* executor, void* ledger, int32_t seat) {
  static_cast<baton::Executor*>(executor)->join(static_cast<baton::Ledger*>(ledger), seat);
}

BATON_EXPORT int32_t baton_allowed(void* executor) {
  return static_cast<baton::Executor*>(executor)->allowed();
}

BATON_EXPORT void baton_profile(void* executor, double* seconds) {
  static_cast<baton::Executor*>(executor)->profile(seconds);
}

// Peaks of this machine, one thread's; what they return keeps the compiler from leaving the work out.
BATON_EXPORT int32_t baton_multiply_bytes(int64_t rounds) { return baton::multiply_bytes(rounds); }
BATON_EXPORT float baton_multiply_floats(int64_t rounds) { return baton::multiply_floats(rounds); }
BATON_EXPORT int32_t baton_read_bytes(const void* data, int64_t bytes) {
  return baton::read_bytes(static_cast<const uint8_t*>(data), bytes);
}
