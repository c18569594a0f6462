// The threads of one parallel region: a pool that sleeps between steps, a barrier, and work handed out by tickets.
// The thread that computes a piece does not influence its bits, so pieces may go to any idle thread: another process on
// one core then costs its own share of time and not the whole step.
#pragma once
#include <atomic>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "amx.h"

namespace inferc {

// How long to spin before the futex, in cycles of a processor of 2 to 4 GHz: threads of one step wait for each other
// for microseconds, and the next step comes some hundred microseconds after the last.
constexpr u64 BARRIER_CYCLES = 200'000, START_CYCLES = 1'000'000;
constexpr int MAX_TICKETS = 16;  // `each` calls between two barriers
constexpr i64 AHEAD_BYTES = 1 << 18;  // prefetched by a waiting thread: a quarter of a second-level cache of 1 MB

// The memory that a thread will read first after a barrier.
struct Ahead {
  const void* data = nullptr;
  i64 bytes = 0;
};

INLINE double milliseconds(clockid_t clock = CLOCK_MONOTONIC) {
  timespec now;
  clock_gettime(clock, &now);
  return double(now.tv_sec) * 1e3 + double(now.tv_nsec) * 1e-6;
}
// How long this thread has waited for others: threads, or ranks.
constinit inline thread_local double waited = 0.0;
struct Waiting {
  const double begin = milliseconds();
  ~Waiting() { waited += milliseconds() - begin; }
};
// How long this thread was ready to run since then but had no core, because another process used it.
struct OnCore {
  double wall = milliseconds(), cpu = milliseconds(CLOCK_THREAD_CPUTIME_ID), others = waited;
  INLINE double lost() const {
    return milliseconds() - wall - (milliseconds(CLOCK_THREAD_CPUTIME_ID) - cpu) - (waited - others);
  }
};

INLINE void futex_wait(std::atomic<u32>& word, u32 seen) {
  syscall(SYS_futex, reinterpret_cast<u32*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
INLINE void futex_wake_all(std::atomic<u32>& word) {
  syscall(SYS_futex, reinterpret_cast<u32*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// A counter that threads wait on to change.
struct alignas(64) Signal {
  std::atomic<u32> value{0};
  std::atomic<u32> sleepers{0};

  void raise() { raise_to(value.load() + 1); }
  void raise_to(u32 next) {
    value.store(next);
    if (sleepers.load()) futex_wake_all(value);
  }
  // A waiting thread prefetches `ahead` into the second-level cache: otherwise the memory would be idle too.
  void wait_while(u32 seen, u64 cycles, Ahead ahead = {}) {
    const char* next = static_cast<const char*>(ahead.data);
    const char* end = next + (ahead.bytes < AHEAD_BYTES ? ahead.bytes : AHEAD_BYTES);
    const u64 longest = ticks_of(cycles);
    for (u64 begin = ticks(); ticks() - begin < longest;) {
      if (value.load(std::memory_order_acquire) != seen) return;
      if (next >= end) relax();
      for (int line = 0; line < 4 && next < end; ++line, next += 64) fetch_l2(next);
    }
    const Waiting others;
    sleepers.fetch_add(1);
    while (value.load() == seen) futex_wait(value, seen);
    sleepers.fetch_sub(1);
  }
};

// The number of threads that share the work. If another process takes a core, the thread that waits for it holds up all
// others at the next barrier for as long as a time slice, and a step is faster without that thread. The measure is how
// long threads were ready but did not run; how often does not tell, because this process's own other threads take a
// core for some microseconds.
struct Roster {
  static constexpr i64 SHORTEST = 100, LONGEST = 3200;  // milliseconds until all are tried again
  int most = 1, active = 1, crowded = 0;
  i64 hold = SHORTEST;
  double until = 0.0;

  // Records a region of `ms` that ended at `now` (milliseconds), whose threads together waited `lost` of them for a
  // core.
  void judge(double now, double ms, double lost) {
    const bool is_new = now > until + double(LONGEST);  // another process than when all threads were tried last
    if (active < most && now >= until) {
      active = most, crowded = 0;
    } else if (lost < 1.0 || lost < ms / 5.0) {
      crowded = 0;
    } else if (++crowded == 2) {
      crowded = 0;
      if (active == most) {
        hold = is_new ? SHORTEST : 2 * hold < LONGEST ? 2 * hold : LONGEST;
        until = now + double(hold);
      }
      if (active > 1) --active;
    }
  }
};

struct Pool {
  struct alignas(64) Counter {
    std::atomic<i64> next{0};
  };
  int count = 1;
  Roster roster;             // used by the thread that runs regions
  std::atomic<i64> lost{0};  // by all threads of a region, in microseconds
  u32 regions = 0;
  void (*work)(void*, int) = nullptr;
  void* context = nullptr;
  pthread_t* threads = nullptr;
  Signal start, phase;
  alignas(64) std::atomic<int> arrived{0};
  Counter tickets[MAX_TICKETS];

  // The signal that starts a region holds the number of threads that take part; the one that ends the pool holds none.
  // A thread without a part may wake only when the region is over and the next signal is there.
  static constexpr u32 MOST_THREADS = 1 << 12;
  static int threads_of(u32 started) { return int(started % MOST_THREADS); }
  void signal(int num_threads) { start.raise_to(++regions * MOST_THREADS + u32(num_threads)); }

  void run(void (*function)(void*, int), void* data) {
    work = function;
    context = data;
    if (roster.active > 1) signal(roster.active);
    function(data, 0);
  }
};

struct Start {
  Pool* pool;
  int tid;
};

// The arguments of a new thread: the one processor that it may run on, unless that is negative.
struct Attributes {
  pthread_attr_t of;
  explicit Attributes(i32 cpu) {
    pthread_attr_init(&of);
    if (cpu < 0) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_attr_setaffinity_np(&of, sizeof(one), &one);
  }
  ~Attributes() { pthread_attr_destroy(&of); }
};

inline void* thread_main(void* data) {
  Start start = *static_cast<Start*>(data);
  delete static_cast<Start*>(data);
  for (u32 seen = 0;;) {
    start.pool->start.wait_while(seen, start.tid < Pool::threads_of(seen) ? START_CYCLES : 0);
    seen = start.pool->start.value.load(std::memory_order_acquire);
    if (Pool::threads_of(seen) == 0) return nullptr;
    if (start.tid < Pool::threads_of(seen)) start.pool->work(start.pool->context, start.tid);
  }
}

inline void close_pool(Pool* pool) {
  pool->signal(0);
  for (int i = 1; i < pool->count; ++i) pthread_join(pool->threads[i], nullptr);
  delete[] pool->threads;
  delete pool;
}

// cpus: the processor that each thread stays on, or null. The first thread is the caller's, which is left as it is.
inline Pool* open_pool(int count, const i32* cpus = nullptr) {
  Pool* pool = new Pool;
  pool->threads = new pthread_t[count];
  for (; pool->count < count; ++pool->count) {
    Start* start = new Start{pool, pool->count};
    const Attributes attributes(cpus ? cpus[pool->count] : -1);
    if (pthread_create(&pool->threads[pool->count], &attributes.of, thread_main, start)) {
      delete start;
      close_pool(pool);
      return nullptr;
    }
  }
  pool->roster.most = pool->roster.active = count;
  return pool;
}

// One thread's view of the region. All threads make the same calls in the same order.
struct Team {
  Pool& pool;
  int tid;
  int count;
  int ticket = 0;

  void barrier(Ahead ahead = {}) {
    release_tiles();
    ticket = 0;
    if (count == 1) {
      for (auto& counter : pool.tickets) counter.next.store(0, std::memory_order_relaxed);
      return;
    }
    u32 seen = pool.phase.value.load(std::memory_order_relaxed);
    if (pool.arrived.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
      pool.arrived.store(0, std::memory_order_relaxed);
      for (auto& counter : pool.tickets) counter.next.store(0, std::memory_order_relaxed);
      pool.phase.raise();
    } else {
      pool.phase.wait_while(seen, BARRIER_CYCLES, ahead);
    }
  }

  // Calls f(begin, end) over [0, total) in pieces of `grain`, without waiting for the other threads at the end. Each
  // thread starts with the piece of its own number, so that it can prefetch; idle threads take the remaining pieces in
  // order.
  template <class F>
  INLINE void each(i64 total, i64 grain, F f) {
    each_early(total, grain, false, [&](i64 begin, i64 end, i64) { f(begin, end); });
  }

  // Calls f(begin, end, after) as above. If `early`, a thread takes its next piece before it works on the current one,
  // and passes where that begins (a value of `total` or more: no further piece).
  template <class F>
  INLINE void each_early(i64 total, i64 grain, bool early, F f) {
    std::atomic<i64>& next = pool.tickets[ticket++].next;
    if (ticket > MAX_TICKETS) __builtin_trap();
    auto take = [&] { return next.fetch_add(grain, std::memory_order_relaxed) + count * grain; };
    for (i64 begin = tid * grain, after = 0; begin < total; begin = after) {
      if (early) after = take();
      f(begin, begin + grain < total ? begin + grain : total, after);
      if (!early) after = take();
    }
  }
};

// Runs f(team) on every thread of the pool and returns when all are done.
template <class F>
void parallel(void* threads, F& f) {
  struct Region {
    Pool* pool;
    F* f;
  } region{static_cast<Pool*>(threads), &f};
  Pool& pool = *region.pool;
  const double begin = milliseconds();
  pool.lost.store(0);
  pool.run(
      [](void* data, int tid) {
        Region& here = *static_cast<Region*>(data);
        const OnCore core;
        Team team{*here.pool, tid, here.pool->roster.active};
        (*here.f)(team);
        here.pool->lost.fetch_add(i64(core.lost() * 1e3));
        team.barrier();
      },
      &region);
  const double end = milliseconds();
  pool.roster.judge(end, end - begin, double(pool.lost.load()) * 1e-3);
}

}  // namespace inferc
