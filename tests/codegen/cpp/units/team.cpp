#include "units.h"

// The number of threads after each of `count` regions.
EXPORT void test_roster(i64 threads, const double* ends, const double* lengths, const double* lost, i64 count, i64* out) {
  Roster roster;
  roster.most = roster.active = int(threads);
  for (i64 i = 0; i < count; ++i) {
    roster.judge(ends[i], lengths[i], lost[i]);
    out[i] = roster.active;
  }
}

// Regions of 1 to all threads in no order: how often each item is handled, by whom, and how many took part.
EXPORT void test_regions(void* threads, i64 regions, i64 items, i64* handled, i64* wrong) {
  Pool& pool = *static_cast<Pool*>(threads);
  u32 state = 7;
  for (i64 region = 0; region < regions; ++region) {
    state = state * 1664525u + 1013904223u;
    pool.roster.active = 1 + int((state >> 16) % u32(pool.count));
    std::atomic<i64> members{0};
    on(threads, [&](Team& t) {
      members += 1;
      if (t.tid >= pool.roster.active) *wrong += 1;
      t.each(items, 1, [&](i64 item, i64) { handled[item] += 1; });
      t.barrier();
      if (members.load() != t.count) *wrong += 1;
    });
    pool.roster.active = pool.count;
  }
}

// Pools that are closed behind a region in which not all threads had a part: how many regions a thread came to, in all.
EXPORT void test_closing(i64 pools, i64 threads, i64* come) {
  std::atomic<i64> members{0};
  for (i64 i = 0; i < pools; ++i) {
    Pool* pool = open_pool(int(threads));
    for (int active = 1; active < threads; ++active) {
      pool->roster.active = active;
      on(pool, [&](Team&) { members += 1; });
    }
    close_pool(pool);
  }
  *come = members.load();
}

// What each of two threads has lost of a region in which thread 0 is busy for so long, or waits for what is not here.
EXPORT void test_waiting(void* threads, i64 ms, i64 elsewhere, double* lost) {
  on(threads, [&](Team& t) {
    const OnCore core;
    if (t.tid == 0 && elsewhere) {
      const Waiting others;
      timespec rest{0, ms * 1'000'000};
      nanosleep(&rest, nullptr);
    } else if (t.tid == 0) {
      for (const double begin = milliseconds(); milliseconds() - begin < double(ms);) relax();
    }
    t.barrier();
    lost[t.tid] = core.lost();
  });
}
