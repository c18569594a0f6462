// From logits to token ids: processors, filters, the draw, log-probabilities. One row is one thread's work and depends
// on nothing but its own logits, parameters and state.
#pragma once
#include "inferc_abi.h"
#include "rows.h"

namespace inferc {

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

// Uniform in [0, 1), 53 bits.
inline double uniform(u64 seed, u64 counter) {
  u32 words[4];
  philox(seed, counter, words);
  return double((u64(words[0]) << 32 | words[1]) >> 11) * 0x1p-53;
}

// Index of the largest, the lower one of equals. NaN never wins.
inline i64 argmax(const float* x, i64 n) {
  Vec top = set1(-__builtin_inff());
  for (i64 i = 0; i < n / LANES * LANES; i += LANES) top = max(load(x + i), top);
  float best = maximum(top);
  for (i64 i = n / LANES * LANES; i < n; ++i) best = x[i] > best ? x[i] : best;
  for (i64 i = 0; i < n; ++i)
    if (x[i] == best) return i;
  return 0;
}

// log(sum(exp(x))): lanes in blocks of 1024, blocks in double.
inline double log_sum_exp(const float* x, i64 n, float top) {
  double total = 0.0;
  for (i64 block = 0; block < n; block += 1024) {
    Vec part = zero();
    i64 end = block + 1024 < n ? block + 1024 : n;
    for (i64 i = block; i < end; i += LANES)
      part = add(part, keep(exp(sub(load(x + i, end - i), set1(top))), 0, int(end - i < LANES ? end - i : LANES), zero()));
    total += sum(part);
  }
  return double(top) + log(total);
}

INLINE u32 order_key(float p) {  // of numbers >= 0
  u32 bits;
  memcpy(&bits, &p, 4);
  return bits;
}

// The largest threshold such that {p >= threshold} has at least `target` weight: each element weighs 1 or its p.
// `above` gets the weight strictly above it. Three rounds of histograms over the bits, no sort. 0 if out of reach.
template <bool MASS>
u32 threshold(const float* p, i64 n, u32 floor, double target, double& above) {
  static constexpr int SHIFT[3] = {21, 10, 0}, BITS[3] = {11, 11, 10};
  u32 prefix = 0;
  above = 0.0;
  for (int level = 0; level < 3; ++level) {
    double weight[2048] = {};
    int upper = SHIFT[level] + BITS[level];
    for (i64 i = 0; i < n; ++i) {
      u32 key = order_key(p[i]);
      if (key < floor || key == 0 || (level && key >> upper != prefix)) continue;
      weight[key >> SHIFT[level] & ((1u << BITS[level]) - 1)] += MASS ? double(p[i]) : 1.0;
    }
    int bucket = (1 << BITS[level]) - 1;
    while (bucket > 0 && above + weight[bucket] < target) above += weight[bucket--];
    prefix = prefix << BITS[level] | u32(bucket);
  }
  return prefix < floor ? floor : prefix;
}

// Which tokens may be drawn: those with p above `key`, and the first ones at `key` until `room` weight is used.
struct Nucleus {
  u32 key = 1;
  double room = __builtin_inf();
};

inline i64 draw(const float* p, i64 n, Nucleus nucleus, double u) {
  double total = 0.0, room = nucleus.room;
  i64 last = argmax(p, n);  // should rounding leave nobody
  for (int pass = 0; pass < 2; ++pass) {
    double goal = u * total, seen = 0.0;
    room = nucleus.room;
    for (i64 i = 0; i < n; ++i) {
      u32 key = order_key(p[i]);
      if (key < nucleus.key) continue;
      if (key == nucleus.key) {
        if (room <= 0.0) continue;
        room -= p[i];
      }
      seen += p[i];
      last = i;
      if (pass && seen > goal) return i;
    }
    total = seen;
  }
  return last;
}

INLINE bool has_list(const i32* starts, i64 row) { return starts && starts[row] < starts[row + 1]; }

// Penalties, bias and masks: x becomes what the choice is made from. False if nothing had to be done.
inline bool process(const SampleArgs& a, i64 row, const float* logits, float* x) {
  i64 n = a.vocab_size;
  float repetition = a.repetition_penalty[row], presence = a.presence_penalty[row], frequency = a.frequency_penalty[row];
  const u32* counts = a.counts ? a.counts[a.seq_slots[row]] : nullptr;
  bool penalties = counts && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  bool allowed = has_list(a.allowed_starts, row), biased = has_list(a.bias_starts, row);
  bool banned = has_list(a.banned_starts, row);
  if (!penalties && !allowed && !biased && !banned) return false;
  memcpy(x, logits, n * sizeof(float));
  for (i64 i = 0; penalties && i < n; ++i) {
    if (!counts[i]) continue;
    u32 times = counts[i] & 0x7fffffffu;
    x[i] = x[i] > 0.0f ? x[i] / repetition : x[i] * repetition;
    if (times) x[i] -= frequency * float(times) + presence;
  }
  for (i64 j = biased ? a.bias_starts[row] : 0; biased && j < a.bias_starts[row + 1]; ++j) x[a.bias_ids[j]] += a.bias_values[j];
  if (allowed) {
    i64 begin = a.allowed_starts[row], end = a.allowed_starts[row + 1];
    i64 at = 0;  // ids are rising
    for (i64 j = begin; j < end; at = a.allowed_ids[j++] + 1)
      for (i64 i = at; i < a.allowed_ids[j]; ++i) x[i] = -__builtin_inff();
    for (i64 i = at; i < n; ++i) x[i] = -__builtin_inff();
  }
  for (i64 j = banned ? a.banned_starts[row] : 0; banned && j < a.banned_starts[row + 1]; ++j) x[a.banned_ids[j]] = -__builtin_inff();
  return true;
}

// Draws from softmax(x / temperature) after top-k, top-p (of what top-k left) and min-p. x may be p.
inline i64 choose(const SampleArgs& a, i64 row, const float* x, float top, float* p) {
  i64 n = a.vocab_size;
  float temperature = a.temperature[row];
  for (i64 i = 0; i < n; i += LANES)
    store(p + i, exp(div(sub(load(x + i, n - i), set1(top)), set1(temperature))), n - i);
  Nucleus nucleus;
  double above = 0.0;
  if (a.top_k[row] > 0 && a.top_k[row] < n) nucleus.key = threshold<false>(p, n, 1, a.top_k[row], above);
  if (a.top_p[row] < 1.0f) {
    double mass = 0.0;
    for (i64 i = 0; i < n; ++i) mass += order_key(p[i]) >= nucleus.key ? double(p[i]) : 0.0;
    double target = mass * double(a.top_p[row]);
    if (!(target > 0.0)) target = 1e-300;  // the most likely one
    nucleus.key = threshold<true>(p, n, nucleus.key, target, above);
    nucleus.room = target > above ? target - above : 1e-300;  // at least one
  }
  u32 least = a.min_p[row] > 0.0f ? order_key(a.min_p[row]) : 0;  // the largest p is 1; -0 is off too
  if (least > nucleus.key) nucleus = Nucleus{least, __builtin_inf()};
  if (nucleus.key == 0) nucleus.key = 1;
  return draw(p, n, nucleus, uniform(a.seeds[row], a.counters[row]));
}

// The chosen token's log-probability and rank, and the most likely tokens, all from the raw logits.
inline void report(const SampleArgs& a, i64 row, const float* logits, i64 chosen) {
  i64 n = a.vocab_size, wanted = a.num_logprobs[row] < a.max_top ? a.num_logprobs[row] : a.max_top;
  double norm = log_sum_exp(logits, n, logits[argmax(logits, n)]);
  a.logprobs[row] = float(logits[chosen] - norm);
  i32 rank = 1;
  for (i64 i = 0; i < n; ++i) rank += logits[i] > logits[chosen];
  a.ranks[row] = rank;
  i32* ids = a.top_ids + row * a.max_top;
  float* values = a.top_logprobs + row * a.max_top;
  i64 found = 0;
  for (i64 i = 0; i < n; ++i) {
    if (found == wanted && !(logits[i] > values[found - 1])) continue;
    i64 at = found < wanted ? found++ : found - 1;
    for (; at > 0 && values[at - 1] < logits[i]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = logits[i];
    ids[at] = i32(i);
  }
  for (i64 i = 0; i < found; ++i) values[i] = float(values[i] - norm);
}

// Samples one row; work is [vocab_size] float32 scratch. False if the logits hold no finite largest value.
inline bool sample_row(const SampleArgs& a, i64 row, const float* logits, float* work) {
  bool changed = process(a, row, logits, work);
  const float* x = changed ? work : logits;
  i64 chosen = argmax(x, a.vocab_size);
  float top = x[chosen];
  if (!(top > -__builtin_inff() && top < __builtin_inff())) return false;
  if (a.temperature[row] > 0.0f) chosen = choose(a, row, x, top, work);
  if (a.num_logprobs[row] > 0) report(a, row, logits, chosen);
  i32 slot = a.seq_slots[row];
  a.token_ids[row] = i32(chosen);
  if (a.counts && a.counts[slot]) ++a.counts[slot][chosen];
  return true;
}

// Rows [first, first + rows) of the step; logits' row 0 is row `first`. A row that fails leaves the others alone. A
// slot's rows are neighbours: it goes on with the id of the last one, whichever thread samples the others when.
inline void sample_rows(Team& team, const SampleArgs& a, i64 first, i64 rows, Rows<const float> logits, float* work) {
  team.each(rows, 1, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = first + i;
      a.failed[row] = !sample_row(a, row, logits[i], work);
      if (a.failed[row]) a.token_ids[row] = 0;
      bool last = row + 1 == a.step->num_rows || a.seq_slots[row + 1] != a.seq_slots[row];
      if (last) a.last_ids[a.seq_slots[row]] = a.token_ids[row];
    }
  });
}

inline void score_rows(Team& team, const ScoreArgs& a, i64 first, i64 rows, Rows<const float> logits) {
  team.each(rows, 1, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 best = argmax(logits[i], a.vocab_size);
      a.argmax[first + i] = i32(best);
      double norm = log_sum_exp(logits[i], a.vocab_size, logits[i][best]);
      a.logprobs[first + i] = float(logits[i][a.target_ids[first + i]] - norm);
    }
  });
}

}  // namespace inferc
