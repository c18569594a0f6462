// A row of logits in parts, and what its tokens weigh: the largest numbers, thresholds, odds. The results of parts are
// combined in ascending order: neither which threads work on a part nor how many they are changes a bit.
#pragma once
#include "rows.h"

namespace inferc {

constexpr i64 PART = 1024;
constexpr int PIVOTS = 7;  // pivots of `threshold` in one pass

// ------------------------------------------------------------------------------------------ a row and who works on it

// The threads that work on a row: all threads of a team, each on consecutive parts, or one thread alone.
struct Crew {
  Team* team;  // null: one thread
  INLINE bool leads() const { return !team || team->tid == 0; }
  INLINE int count() const { return team ? team->count : 1; }
  INLINE i64 begin(i64 parts, int thread) const { return parts * thread / count(); }
  INLINE void meet() const {
    if (team) team->barrier();
  }
  // Calls f(first part, end) for the parts of this thread: always the same ones, so that its cache holds them.
  template <class F>
  INLINE void share(i64 parts, F f) const {
    const int thread = team ? team->tid : 0;
    f(begin(parts, thread), begin(parts, thread + 1));
  }
};

// The scratch of a row of `vocab` logits; codegen/cpp/emit.py computes its size.
struct RowWork {
  float *x, *list;  // the processed logits; numbers among which a threshold is searched
  float* tops;      // [parts][16]: the largest number at each of 16 places
  double* mass;     // [parts]
  i32 *ties, *listed;  // [parts]
  float* least;     // the result of the leader
  double* above;
  RowWork(char* at, i64 vocab) {
    const i64 parts = (vocab + PART - 1) / PART;
    x = take<float>(at, vocab), list = take<float>(at, parts * PART + LANES);
    tops = take<float>(at, parts * LANES), mass = take<double>(at, parts);
    ties = take<i32>(at, parts), listed = take<i32>(at, parts);
    least = take<float>(at, 1), above = take<double>(at, 1);
  }
};

// A row of n numbers in parts.
struct Parted {
  const float* x;
  i64 n;
  INLINE i64 parts() const { return (n + PART - 1) / PART; }
  INLINE i64 end(i64 part) const { return (part + 1) * PART < n ? (part + 1) * PART : n; }
  // The 16 numbers from i on, with -inf after the last.
  INLINE Vec at(i64 i) const {
    if (i + LANES <= n) return load(x + i);
    const Vec none = set1(-__builtin_inff());
    return i < n ? keep(load(x + i, n - i), 0, int(n - i), none) : none;
  }
  // Which of the 16 numbers from i on exist.
  INLINE u32 there(i64 i) const { return i + LANES <= n ? 0xffffu : (1u << (n - i)) - 1; }
  // Calls f(i) for every 16 numbers of a part.
  template <class F>
  INLINE void each(i64 part, F f) const {
    for (i64 i = part * PART, stop = end(part); i < stop; i += LANES) f(i);
  }
};

// Calls f(row, crew, scratch) for every row. Each thread takes whole rows, or all threads work on one row if there
// would be rows for less than half of them. scratch[thread] belongs to one thread.
template <class F>
INLINE void each_row(Team& team, i64 rows, Rows<char> scratch, F f) {
  const i64 left = rows % team.count, alone = 2 * left <= team.count ? rows - left : rows;
  team.each(alone, 1, [&](i64 row, i64) { f(row, Crew{nullptr}, scratch[team.tid]); });
  for (i64 row = alone; row < rows; ++row) {
    team.barrier();  // thread 0 has used its scratch for another row
    f(row, Crew{&team}, scratch[0]);
  }
}

// ------------------------------------------------------------------------------------------ the largest, and
// thresholds

// Finds the largest number at each of 16 places of every part. NaN is never the largest.
INLINE void find_tops(const Crew& crew, const Parted& row, const RowWork& work) {
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part) {
      Vec top[4];
      for (Vec& each : top) each = set1(-__builtin_inff());
      i64 i = part * PART;
      for (; i + 4 * LANES <= row.end(part); i += 4 * LANES) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) top[k] = max(load(row.x + i + k * LANES), top[k]);
      }
      for (; i < row.end(part); i += LANES) top[0] = max(row.at(i), top[0]);
      store(work.tops + part * LANES, max(max(top[0], top[1]), max(top[2], top[3])));
    }
  });
  crew.meet();
}

INLINE float largest(const RowWork& work, i64 parts) {
  Vec top = load(work.tops);
  for (i64 part = 1; part < parts; ++part) top = max(load(work.tops + part * LANES), top);
  return maximum(top);
}

// Whether a part may contain a number of at least `value`.
INLINE bool reaches(const RowWork& work, i64 part, float value) {
  return lanes_at_least(load(work.tops + part * LANES), set1(value)) != 0;
}

// The index of the first number equal to `value`; 0 if there is none.
inline i64 first_of(const Parted& row, const RowWork& work, float value) {
  for (i64 part = 0; part < row.parts(); ++part) {
    if (!reaches(work, part, value)) continue;
    for (i64 i = part * PART; i < row.end(part); i += LANES)
      if (const u32 lanes = lanes_at_least(row.at(i), set1(value)) & row.there(i)) return i + __builtin_ctz(lanes);
  }
  return 0;
}

// Converts floats to integers in the same order, and back.
INLINE i32 order_of(float x) {
  i32 bits;
  memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
INLINE float of_order(i32 order) {
  const i32 bits = order ^ ((order >> 31) & 0x7fffffff);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Cuts [low, high] in eight parts: evenly, or by the order of floats if that is asked or an even cut has no room.
INLINE void set_pivots(float low, float high, bool by_order, float (&pivots)[PIVOTS]) {
  for (int j = 0; j < PIVOTS && !by_order; ++j) {
    pivots[j] = low + (high - low) * (float(j + 1) / (PIVOTS + 1));
    by_order = !(pivots[j] > low && pivots[j] <= high);
  }
  const i64 first = order_of(low), range = order_of(high) - first;
  for (int j = 0; j < PIVOTS && by_order; ++j)
    pivots[j] = of_order(i32(first + (range * (j + 1) + PIVOTS) / (PIVOTS + 1)));
}

// What `threshold` compares of the numbers of a list, and what each weighs: itself and 1, or itself and itself.
struct ByCount {
  using Sum = Vec;
  INLINE Vec key(Vec v) const { return v; }
  INLINE Vec weight(Vec) const { return set1(1.0f); }
};
struct ByMass {
  using Sum = Wide;
  INLINE Vec key(Vec v) const { return v; }
  INLINE Vec weight(Vec v) const { return v; }
};

// Returns the largest key of the first `count` numbers of a list such that the numbers with keys not below it weigh at
// least `target`. `above` gets the weight of those above it. If all together weigh less, it is the smallest key. The
// list has room for 16 more and no NaN, and is overwritten: each pass keeps the numbers between two of several pivots.
template <class By>
float threshold(float* list, i64 count, double target, double& above, By by = {}) {
  using Sum = typename By::Sum;
  constexpr bool MASS = std::is_same_v<Sum, Wide>;
  const Vec none = set1(-__builtin_inff());
  above = 0.0;
  for (bool by_order = MASS;; by_order = !by_order) {
    store(list + count, none);
    Vec bottom = set1(__builtin_inff()), top = none;
    for (i64 i = 0; i < count; i += LANES) {
      const Vec v = by.key(load(list + i));
      top = max(v, top);
      bottom = min(keep(v, 0, count - i < LANES ? int(count - i) : LANES, bottom), bottom);
    }
    const float low = -maximum(sub(zero(), bottom)), high = maximum(top);
    if (!(low < high)) return low;  // all numbers that are left are equal
    float pivots[PIVOTS];
    set_pivots(low, high, by_order, pivots);
    Sum sums[PIVOTS] = {};
    for (i64 i = 0; i < count; i += LANES) {
      const Vec v = load(list + i), key = by.key(v), weight = by.weight(v);
#pragma GCC unroll 8
      for (int j = 0; j < PIVOTS; ++j) sums[j] = add(sums[j], at_least(key, set1(pivots[j]), weight));
    }
    double upper = 0.0;
    int j = PIVOTS;
    for (; j > 0; --j) {
      const double weight = sum(sums[j - 1]);
      if (above + weight >= target) break;
      upper = weight;
    }
    above += upper;
    const Vec from = set1(j ? pivots[j - 1] : low), to = set1(pivots[j < PIVOTS ? j : 0]);
    i64 left = 0;
    for (i64 i = 0; i < count; i += LANES) {
      const Vec v = load(list + i), key = by.key(v);
      const u32 there = count - i < LANES ? (1u << (count - i)) - 1 : 0xffffu;
      const u32 beyond = j < PIVOTS ? lanes_at_least(key, to) : 0;
      left += store_packed(list + left, v, lanes_at_least(key, from) & ~beyond & there);
    }
    count = left;
  }
}

// Stores the numbers of at least `from` in the parts [part, stop) without gaps, where there is room for all of them and
// 16.
INLINE i64 collect(const Parted& row, const RowWork& work, i64 part, i64 stop, float from, float* list) {
  i64 count = 0;
  for (; part < stop; ++part) {
    if (!reaches(work, part, from)) continue;
    row.each(part, [&](i64 i) {
      const Vec x = row.at(i);
      count += store_packed(list + count, x, lanes_at_least(x, set1(from)) & row.there(i));
    });
  }
  return count;
}

// Finds the k-th largest number of a row, by one thread; `above`: how many are larger. The k-th largest of any maxima
// is a lower bound.
inline float kth_largest(const Parted& row, const RowWork& work, i64 k, double& above) {
  const i64 parts = row.parts();
  float bound = -__builtin_inff();
  if (k < parts * LANES) {
    memcpy(work.list, work.tops, parts * LANES * sizeof(float));
    bound = threshold<ByCount>(work.list, parts * LANES, double(k), above);
  }
  const i64 count = collect(row, work, 0, parts, bound, work.list);
  return threshold<ByCount>(work.list, count, double(k), above);
}

// ------------------------------------------------------------------------------------------ what may be drawn

// Numbers p in proportion to the probabilities, the largest of which is 1; those of logits below `least` are 0.
struct Odds {
  Parted row;
  float top, scale, least;
  INLINE Vec of(Vec x) const { return exp(mul(sub(x, set1(top)), set1(scale))); }
  INLINE Vec at(i64 i) const {
    const Vec x = row.at(i);
    return at_least(x, set1(least), of(x));
  }
  // A bound: all logits with a p of `low` or more are at least this, as are some with a slightly smaller p.
  INLINE float from(float low) const {
    const float x = low >= __FLT_MIN__ ? top + (logf(low) - 0.001f) / scale : least;
    return x > least ? x : least;
  }
};

// The cut of tokens: those with p above `above`, and the first `ties` of those with p equal to it.
struct Cut {
  float above = 0.0f;
  i64 ties = 0;
};

// The weight of all tokens of a part. Four p are added in float before they are added in double.
INLINE double weight_of(const Odds& odds, i64 part) {
  Wide mass = {};
  for (i64 i = part * PART; i < odds.row.end(part); i += 4 * LANES)
    mass = add(mass, add(add(odds.at(i), odds.at(i + LANES)), add(odds.at(i + 2 * LANES), odds.at(i + 3 * LANES))));
  return sum(mass);
}

// The weight of the tokens above the cut, and the number of tokens at the cut, for each part.
INLINE void weigh(const Crew& crew, const Odds& odds, Cut cut, const RowWork& work) {
  const Vec at = set1(cut.above), from = set1(odds.from(cut.above));
  const bool all = cut.above == 0.0f && odds.least == -__builtin_inff();
  crew.share(odds.row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part) {
      work.ties[part] = 0;
      work.mass[part] = all ? weight_of(odds, part) : 0.0;
      if (all || !reaches(work, part, first(from))) continue;
      Wide mass = {};
      i64 ties = 0;
      odds.row.each(part, [&](i64 i) {
        if (!lanes_at_least(odds.row.at(i), from)) return;
        const Vec p = odds.at(i);
        mass = add(mass, less(at, p, p, zero()));
        if (cut.ties) ties += __builtin_popcount(lanes_at_least(p, at) & lanes_at_least(at, p));
      });
      work.mass[part] = sum(mass);
      work.ties[part] = i32(ties);
    }
  });
  crew.meet();
}

INLINE double total_mass(const RowWork& work, i64 parts) {
  double total = 0.0;
  for (i64 part = 0; part < parts; ++part) total += work.mass[part];
  return total;
}

}  // namespace inferc
