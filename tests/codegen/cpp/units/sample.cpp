#include "units.h"

EXPORT void* threads_open(int count) { return open_pool(count); }
EXPORT void threads_close(void* pool) { close_pool(static_cast<Pool*>(pool)); }

EXPORT double test_uniform(u64 seed, u64 counter) { return uniform(seed, counter); }
EXPORT void test_philox(u64 key, u64 counter, u32* out) {
  u32 words[4];
  philox(key, counter, words);
  memcpy(out, words, sizeof words);
}
// All rows, with `bytes` of scratch for each thread.
EXPORT void test_sample(void* pool, const SampleArgs* a, float* logits, char* scratch, i64 bytes) {
  on(pool, [&](Team& t) { sample_rows(t, *a, 0, a->step->num_rows, {logits, a->vocab_size}, {scratch, bytes}); });
  keep_chosen(*a);
}
EXPORT void test_score(void* pool, const ScoreArgs* a, const float* logits, char* scratch, i64 bytes) {
  on(pool, [&](Team& t) { score_rows(t, *a, 0, a->step->num_rows, {logits, a->vocab_size}, {scratch, bytes}); });
}
// The largest of the list that, with all above it, weighs `target`: see `threshold`.
EXPORT double test_threshold(float* list, i64 count, double target, i64 by_mass, double* above) {
  return by_mass ? threshold<ByMass>(list, count, target, *above) : threshold<ByCount>(list, count, target, *above);
}

// Counts how often each of `total` items is handed out; pieces of one thread rise, its first is the one of its number, and
// if taken early each begins where the one before was told.
EXPORT i64 test_each(void* pool, i64 total, i64 grain, i64 early, i32* counts) {
  std::atomic<i64> wrong{0};
  on(pool, [&](Team& t) {
    i64 last = -1, promised = 0;
    t.each_early(total, grain, early, [&](i64 begin, i64 end, i64 after) {
      if (last < 0 ? begin != t.tid * grain : begin < last || (early && begin != promised)) ++wrong;
      promised = after;
      for (i64 i = begin; i < end; ++i) __atomic_fetch_add(counts + i, 1, __ATOMIC_RELAXED);
      last = end;
    });
    if (early && last >= 0 && promised < total) ++wrong;
    t.barrier({counts, total * 4});
  });
  return wrong.load();
}

EXPORT i64 test_barriers(void* pool, i64 rounds) {  // every thread must see every other's last round
  std::atomic<i64> arrived{0}, wrong{0};
  on(pool, [&](Team& t) {
    for (i64 round = 1; round <= rounds; ++round) {
      ++arrived;
      t.barrier();
      if (arrived.load() != round * t.count) ++wrong;
      t.barrier();
    }
  });
  return wrong.load();
}
