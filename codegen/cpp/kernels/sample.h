// Sampling, from logits to token ids: logits processors, filters, the draw, log-probabilities. A row depends only on
// its own logits, parameters and state. It is cut into parts whose results are combined in ascending order: neither
// which threads work on a part nor how many they are changes a bit.
#pragma once
#include "inferc_abi.h"
#include "rows.h"

namespace inferc {

constexpr i64 PART = 1024;
constexpr int PIVOTS = 7;  // pivots of `threshold` in one pass

// Philox 4x32-10: four random words that are a pure function of key and counter.
// Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
inline void philox(u64 key, u64 counter, u32 (&out)[4]) {
  u32 k0 = u32(key), k1 = u32(key >> 32), c[4] = {u32(counter), u32(counter >> 32), 0, 0};
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    u64 a = u64(0xD2511F53u) * c[0], b = u64(0xCD9E8D57u) * c[2];
    u32 next[4] = {u32(b >> 32) ^ c[1] ^ k0, u32(b), u32(a >> 32) ^ c[3] ^ k1, u32(a)};
    memcpy(c, next, sizeof c);
  }
  memcpy(out, c, sizeof c);
}

// A uniform number in [0, 1), with 53 bits.
inline double uniform(u64 seed, u64 counter) {
  u32 words[4];
  philox(seed, counter, words);
  return double((u64(words[0]) << 32 | words[1]) >> 11) * 0x1p-53;
}

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

// Returns the largest number of the first `count` of a list such that the numbers not below it weigh at least `target`;
// each weighs 1, or itself if MASS. `above` gets the weight of the numbers above it. If all together weigh less, it is
// the smallest number. The list has room for 16 more and no NaN, and is overwritten: each pass keeps the numbers
// between two of several pivots.
template <bool MASS>
float threshold(float* list, i64 count, double target, double& above) {
  using Sum = std::conditional_t<MASS, Wide, Vec>;
  const Vec none = set1(-__builtin_inff()), one = set1(1.0f);
  above = 0.0;
  for (bool by_order = MASS;; by_order = !by_order) {
    store(list + count, none);
    Vec bottom = set1(__builtin_inff()), top = none;
    for (i64 i = 0; i < count; i += LANES) {
      const Vec v = load(list + i);
      top = max(v, top);
      bottom = min(keep(v, 0, count - i < LANES ? int(count - i) : LANES, bottom), bottom);
    }
    const float low = -maximum(sub(zero(), bottom)), high = maximum(top);
    if (!(low < high)) return low;  // all numbers that are left are equal
    float pivots[PIVOTS];
    set_pivots(low, high, by_order, pivots);
    Sum sums[PIVOTS] = {};
    for (i64 i = 0; i < count; i += LANES) {
      const Vec v = load(list + i);
#pragma GCC unroll 8
      for (int j = 0; j < PIVOTS; ++j) sums[j] = add(sums[j], at_least(v, set1(pivots[j]), MASS ? v : one));
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
      const Vec v = load(list + i);
      const u32 there = count - i < LANES ? (1u << (count - i)) - 1 : 0xffffu;
      const u32 beyond = j < PIVOTS ? lanes_at_least(v, to) : 0;
      left += store_packed(list + left, v, lanes_at_least(v, from) & ~beyond & there);
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
    bound = threshold<false>(work.list, parts * LANES, double(k), above);
  }
  const i64 count = collect(row, work, 0, parts, bound, work.list);
  return threshold<false>(work.list, count, double(k), above);
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

// Finds the top-p cut among the tokens that top-k left, which weigh `mass`. A number is ignored as too small if even a
// whole row of twice its size would not reach the rest of the mass.
INLINE Cut nucleus(const Crew& crew, const Odds& odds, double mass, float top_p, const RowWork& work) {
  const Parted& row = odds.row;
  const double target = mass * double(top_p);
  const float low = float((mass - target) / double(row.n) * 0.5);
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    if (part == stop) return;
    float* list = work.list + part * PART;
    const i64 count = collect(row, work, part, stop, odds.from(low), list);
    for (i64 i = 0; i < count; i += LANES) store(list + i, odds.of(load(list + i)));
    work.listed[part] = i32(count);
  });
  crew.meet();
  if (crew.leads()) {
    i64 count = 0;
    for (int thread = 0; thread < crew.count(); ++thread) {
      const i64 first = crew.begin(row.parts(), thread);
      if (first == crew.begin(row.parts(), thread + 1)) continue;
      memmove(work.list + count, work.list + first * PART, work.listed[first] * sizeof(float));
      count += work.listed[first];
    }
    *work.least = threshold<true>(work.list, count, target, *work.above);
  }
  crew.meet();
  if (!(*work.least > 0.0f)) return {};
  const double room = (target - *work.above) / double(*work.least), most = double(row.n);
  return {*work.least, room > 1.0 ? i64(ceil(room < most ? room : most)) : 1};  // at least one
}

// Returns the token at which the running sum of the tokens that may be drawn passes u times the total. By one thread.
inline i64 draw(const Odds& odds, Cut cut, double u, const RowWork& work) {
  const Parted& row = odds.row;
  const i64 parts = row.parts();
  double total = 0.0;
  i64 ties = cut.ties, last = -1;
  for (i64 part = 0; part < parts; ++part) {
    const i64 taken = work.ties[part] < ties ? work.ties[part] : ties;
    work.ties[part] = i32(taken);
    work.mass[part] += double(taken) * double(cut.above);
    total += work.mass[part], ties -= taken;
    if (work.mass[part] > 0.0) last = part;
  }
  if (last < 0) return first_of(row, work, odds.top);  // min-p was above 1
  const double goal = u * total;
  double seen = 0.0;
  i64 part = 0;
  for (; part < last && seen + work.mass[part] <= goal; ++part) seen += work.mass[part];
  alignas(64) float p[PART];
  row.each(part, [&](i64 i) { store(p + (i - part * PART), odds.at(i)); });
  i64 chosen = -1;
  ties = work.ties[part];
  for (i64 i = part * PART; i < row.end(part) && !(chosen >= 0 && seen > goal); ++i) {
    const float each = p[i - part * PART];
    if (!(each > cut.above) && !(each == cut.above && ties-- > 0)) continue;
    seen += double(each);
    chosen = i;  // the last token stays chosen if rounding leaves none
  }
  return chosen;
}

// ------------------------------------------------------------------------------------------ one row

INLINE bool has_list(const i32* starts, i64 row) { return starts && starts[row] < starts[row + 1]; }

// Sets the numbers in [from, end) of the tokens whose bit is not set to -inf; `from` is a multiple of 32.
INLINE void mask_out(const u32* bits, i64 from, i64 end, float* x) {
  const Vec none = set1(-__builtin_inff());
  i64 i = from;
  for (; i + 32 <= end; i += 32) {
    const u32 word = bits[i / 32];  // most words are full within a text, and empty between two
    if (word == ~0u) continue;
    store(x + i, word & 0xffffu ? only(load(x + i), word & 0xffffu, none) : none);
    store(x + i + LANES, word >> 16 ? only(load(x + i + LANES), word >> 16, none) : none);
  }
  for (; i < end; ++i)
    if (!(bits[i / 32] >> (i & 31) & 1)) x[i] = -__builtin_inff();
}

// Rows of one slot follow one another: the first continues the slot's last id, and each other one the id that was drafted
// for the row before it. Returns that id.
INLINE i32 drafted(const SampleArgs& a, i64 row) { return a.step->token_ids[a.step->logits_rows[row]]; }

// Returns how many rows of the slot come before a row.
INLINE i64 rows_before(const SampleArgs& a, i64 row) {
  i64 first = row;
  while (first > 0 && a.seq_slots[first - 1] == a.seq_slots[row]) --first;
  return row - first;
}

// Applies penalties, bias and masks, and returns the processed logits: in place, or in x if log-probabilities of the
// raw ones are asked for. The ids drafted for the rows before count as chosen.
inline float* process(const Crew& crew, const SampleArgs& a, i64 row, float* logits, float* x) {
  const i64 n = a.vocab_size;
  const float repetition = a.repetition_penalty[row], presence = a.presence_penalty[row];
  const float frequency = a.frequency_penalty[row];
  const u32* counts = a.counts ? a.counts[a.seq_slots[row]] : nullptr;
  const bool penalties = counts && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  const bool allowed = has_list(a.allowed_starts, row), biased = has_list(a.bias_starts, row);
  const bool banned = has_list(a.banned_starts, row);
  const i64 mask = a.mask_rows ? a.mask_rows[row] : -1;
  const u32* bits = mask >= 0 ? a.masks + mask * ((n + 31) / 32) : nullptr;
  if (!penalties && !allowed && !biased && !banned && !bits) return logits;
  if (a.num_logprobs[row] == 0) x = logits;
  const i64 before = penalties ? rows_before(a, row) : 0;
  float raw[INFERC_MAX_DRAFTED];
  if (before) {
    for (i64 j = 0; j < before; ++j) raw[j] = logits[drafted(a, row - j)];
    crew.meet();  // the numbers may be changed in place
  }
  auto punished = [&](float value, u32 count) {
    const u32 times = count & 0x7fffffffu;
    value = value > 0.0f ? value / repetition : value * repetition;
    return times ? value - (frequency * float(times) + presence) : value;
  };
  auto punish = [&](i64 i) {
    if (counts[i]) x[i] = punished(x[i], counts[i]);
  };
  crew.share((n + PART - 1) / PART, [&](i64 part, i64 stop) {
    const i64 end = stop * PART < n ? stop * PART : n;
    i64 i = part * PART;
    if (i >= end) return;
    if (x != logits) memcpy(x + i, logits + i, (end - i) * sizeof(float));
    for (; penalties && i < end; i += LANES)  // nearly all tokens have not occurred
      if (i + LANES > end || any(iload(counts + i)))
        for (i64 j = i; j < i + LANES && j < end; ++j) punish(j);
    if (bits) mask_out(bits, part * PART, end, x);
  });
  crew.meet();
  if (crew.leads()) {
    for (i64 j = 0; j < before; ++j) {
      const i32 id = drafted(a, row - j);
      u32 count = counts[id];
      for (i64 k = 0; k < before; ++k) count += drafted(a, row - k) == id;
      if (!bits || bits[id / 32] >> (id & 31) & 1) x[id] = punished(raw[j], count);
    }
    for (i64 j = biased ? a.bias_starts[row] : 0; biased && j < a.bias_starts[row + 1]; ++j)
      x[a.bias_ids[j]] += a.bias_values[j];
    if (allowed) {
      i64 at = 0;  // ids are ascending
      for (i64 j = a.allowed_starts[row]; j < a.allowed_starts[row + 1]; at = a.allowed_ids[j++] + 1)
        for (i64 i = at; i < a.allowed_ids[j]; ++i) x[i] = -__builtin_inff();
      for (i64 i = at; i < n; ++i) x[i] = -__builtin_inff();
    }
    for (i64 j = banned ? a.banned_starts[row] : 0; banned && j < a.banned_starts[row + 1]; ++j)
      x[a.banned_ids[j]] = -__builtin_inff();
  }
  crew.meet();
  return x;
}

// Draws from softmax(x / temperature) after top-k, top-p (of the tokens that top-k left) and min-p. The leader's result
// counts.
inline i64 choose(const Crew& crew, const SampleArgs& a, i64 row, const Parted& x, float top, const RowWork& work) {
  const float scale = 1.0f / a.temperature[row];
  Odds odds{x, top, scale < __FLT_MAX__ ? scale : __FLT_MAX__, -__builtin_inff()};
  if (a.top_k[row] > 0 && a.top_k[row] < x.n) {
    if (crew.leads()) *work.least = kth_largest(x, work, a.top_k[row], *work.above);
    crew.meet();
    odds.least = *work.least;
  }
  Cut cut;
  const float least = a.min_p[row];
  if (a.top_p[row] < 1.0f) {
    weigh(crew, odds, cut, work);
    cut = nucleus(crew, odds, total_mass(work, x.parts()), a.top_p[row], work);
  }
  if (least > cut.above) cut = {of_order(order_of(least) - 1), 0};
  weigh(crew, odds, cut, work);
  return crew.leads() ? draw(odds, cut, uniform(a.seeds[row], a.counters[row]), work) : 0;
}

// Computes log(sum(exp(x))) of a row whose tops are known. The leader's result counts.
INLINE double log_sum_exp(const Crew& crew, const Parted& row, float top, const RowWork& work) {
  weigh(crew, Odds{row, top, 1.0f, -__builtin_inff()}, Cut{}, work);
  return crew.leads() ? double(top) + log(total_mass(work, row.parts())) : 0.0;
}

// Finds the `wanted` largest numbers of a row, in descending order, equal ones by ascending id. By one thread.
inline void most_likely(const Parted& row, const RowWork& work, i64 wanted, i32* ids, float* values) {
  double above = 0.0;
  const float least = kth_largest(row, work, wanted, above);
  i64 ties = wanted - i64(above), found = 0;
  for (i64 part = 0; part < row.parts() && found < wanted; ++part) {
    if (!reaches(work, part, least)) continue;
    row.each(part, [&](i64 i) {
      const Vec x = row.at(i);
      for (u32 lanes = lanes_at_least(x, set1(least)) & row.there(i); lanes; lanes &= lanes - 1) {
        const i64 id = i + __builtin_ctz(lanes);
        if (row.x[id] == least && ties-- <= 0) continue;
        i64 at = found++;
        for (; at > 0 && values[at - 1] < row.x[id]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = row.x[id], ids[at] = i32(id);
      }
    });
  }
}

// Writes the chosen token's log-probability and rank, and the most likely tokens, from raw logits whose tops are known.
inline void report(const Crew& crew, const SampleArgs& a, i64 row, const Parted& logits, i64 chosen,
                   const RowWork& work) {
  const i64 most = a.num_logprobs[row] < a.max_top ? a.num_logprobs[row] : a.max_top;
  const i64 wanted = most < logits.n ? most : logits.n;
  const double norm = log_sum_exp(crew, logits, largest(work, logits.parts()), work);
  if (!crew.leads()) return;
  const Vec own = set1(logits.x[chosen]);
  i64 rank = 1;
  for (i64 part = 0; part < logits.parts(); ++part)
    if (reaches(work, part, logits.x[chosen]))
      logits.each(part, [&](i64 i) { rank += __builtin_popcount(lanes_less(own, logits.at(i))); });
  a.logprobs[row] = float(logits.x[chosen] - norm);
  a.ranks[row] = i32(rank);
  float* values = a.top_logprobs + row * a.max_top;
  most_likely(logits, work, wanted, a.top_ids + row * a.max_top, values);
  for (i64 i = 0; i < wanted; ++i) values[i] = float(values[i] - norm);
}

// Samples one row: the id, or -1 if the logits hold no finite largest value. The leader's result counts.
inline i64 sample_row(const Crew& crew, const SampleArgs& a, i64 row, float* logits, const RowWork& work) {
  const Parted raw{logits, a.vocab_size}, x{process(crew, a, row, logits, work.x), a.vocab_size};
  find_tops(crew, x, work);
  const float top = largest(work, x.parts());
  if (!(top > -__builtin_inff() && top < __builtin_inff())) return -1;
  const i64 chosen = a.temperature[row] > 0.0f ? choose(crew, a, row, x, top, work)
                     : crew.leads()            ? first_of(x, work, top)
                                               : 0;
  if (a.num_logprobs[row] > 0) {
    crew.meet();  // the leader has drawn
    if (x.x != raw.x) find_tops(crew, raw, work);
    report(crew, a, row, raw, chosen, work);
  }
  return chosen;
}

// Samples rows [first, first + rows) of the step; row 0 of `logits`, which are overwritten, is row `first`. A row that
// fails leaves the others alone.
inline void sample_rows(Team& team, const SampleArgs& a, i64 first, i64 rows, Rows<float> logits, Rows<char> scratch) {
  each_row(team, rows, scratch, [&](i64 i, const Crew& crew, char* own) {
    const i64 row = first + i, chosen = sample_row(crew, a, row, logits[i], RowWork(own, a.vocab_size));
    if (!crew.leads()) return;
    a.failed[row] = chosen < 0;
    a.token_ids[row] = chosen < 0 ? 0 : i32(chosen);
  });
}

// Notes what the rows chose in the state of their slots. A row counts only if the one before it, of the same slot, chose
// the id that had been drafted. By one thread, when all rows are sampled.
inline void keep_chosen(const SampleArgs& a) {
  bool counts = false;
  for (i64 row = 0; row < a.step->num_rows; ++row) {
    const i32 slot = a.seq_slots[row];
    const bool begins = row == 0 || a.seq_slots[row - 1] != slot;
    counts = begins || (counts && !a.failed[row - 1] && a.token_ids[row - 1] == drafted(a, row));
    if (!counts) continue;
    a.last_ids[slot] = a.token_ids[row];
    if (!a.failed[row] && a.counts && a.counts[slot]) ++a.counts[slot][a.token_ids[row]];
  }
}

// Returns whether no slot with counts has more rows than may be drafted for at once.
inline bool are_drafts_short(const SampleArgs& a) {
  i64 run = 0;
  for (i64 row = 1; row < a.step->num_rows; ++row) {
    const i32 slot = a.seq_slots[row];
    run = slot == a.seq_slots[row - 1] ? run + 1 : 0;
    if (run > INFERC_MAX_DRAFTED && a.counts && a.counts[slot]) return false;
  }
  return true;
}

inline void score_rows(Team& team, const ScoreArgs& a, i64 first, i64 rows, Rows<const float> logits,
                       Rows<char> scratch) {
  each_row(team, rows, scratch, [&](i64 i, const Crew& crew, char* own) {
    const Parted row{logits[i], a.vocab_size};
    const RowWork work(own, a.vocab_size);
    find_tops(crew, row, work);
    const float top = largest(work, row.parts());
    const double norm = log_sum_exp(crew, row, top, work);
    if (!crew.leads()) return;
    a.argmax[first + i] = i32(first_of(row, work, top));
    a.logprobs[first + i] = float(row.x[a.target_ids[first + i]] - norm);
  });
}

}  // namespace inferc
