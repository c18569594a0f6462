// Sampling, from logits to token ids: logits processors, filters, the draw, log-probabilities. A row depends only on
// its own logits, parameters and state. It is cut into parts whose results are combined in ascending order: neither
// which threads work on a part nor how many they are changes a bit.
#pragma once
#include "inferc_abi.h"
#include "narrow.h"

namespace inferc {

constexpr u32 XTC_STREAM = 1;  // of the random numbers of a row: 0 has the draw's

// Philox 4x32-10: four random words that are a pure function of key, counter and stream.
// Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
inline void philox(u64 key, u64 counter, u32 (&out)[4], u32 stream = 0) {
  u32 k0 = u32(key), k1 = u32(key >> 32), c[4] = {u32(counter), u32(counter >> 32), stream, 0};
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    u64 a = u64(0xD2511F53u) * c[0], b = u64(0xCD9E8D57u) * c[2];
    u32 next[4] = {u32(b >> 32) ^ c[1] ^ k0, u32(b), u32(a >> 32) ^ c[3] ^ k1, u32(a)};
    memcpy(c, next, sizeof c);
  }
  memcpy(out, c, sizeof c);
}

// A uniform number in [0, 1), with 53 bits.
inline double uniform(u64 seed, u64 counter, u32 stream = 0) {
  u32 words[4];
  philox(seed, counter, words, stream);
  return double((u64(words[0]) << 32 | words[1]) >> 11) * 0x1p-53;
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
    *work.least = threshold<ByMass>(work.list, count, target, *work.above);
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
// behind its parent. Returns that id.
INLINE i32 drafted(const SampleArgs& a, i64 row) { return a.step->token_ids[a.step->logits_rows[row]]; }

// Returns the row that chooses what a row was drafted for; -1 for a slot's first row.
INLINE i64 parent_of(const SampleArgs& a, i64 row) {
  if (a.parents) return a.parents[row];
  return row > 0 && a.seq_slots[row - 1] == a.seq_slots[row] ? row - 1 : -1;
}

// Finds the ids that were drafted up to a row, the row's own first, and returns how many. INFERC_MAX_DRAFTED fit.
INLINE i64 drafts_before(const SampleArgs& a, i64 row, i32* ids) {
  i64 count = 0;
  for (i64 parent = parent_of(a, row); parent >= 0; row = parent, parent = parent_of(a, row)) ids[count++] = drafted(a, row);
  return count;
}

// Applies penalties, bias and masks, and returns the processed logits: in place, or in x if log-probabilities of the
// raw ones are asked for. The ids drafted on the way to the row count as chosen.
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
  float raw[INFERC_MAX_DRAFTED];
  i32 ids[INFERC_MAX_DRAFTED];
  const i64 before = penalties ? drafts_before(a, row, ids) : 0;
  if (before) {
    for (i64 j = 0; j < before; ++j) raw[j] = logits[ids[j]];
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
      const i32 id = ids[j];
      u32 count = counts[id];
      for (i64 k = 0; k < before; ++k) count += ids[k] == id;
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

// Draws from softmax(x / temperature) after top-k, top-p (of the tokens that top-k left) and min-p, then typical-p and
// XTC of what these left. The leader's result counts.
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
  const float typical_p = a.typical_p[row], xtc = a.xtc_probability[row];
  const bool excludes = xtc > 0.0f && uniform(a.seeds[row], a.counters[row], XTC_STREAM) < double(xtc);
  if ((typical_p < 1.0f || excludes) && !(least > 1.0f)) {
    odds = keep_cut(crew, odds, cut, work);
    if (typical_p < 1.0f) keep_typical(crew, odds, typical_p, work);
    if (excludes) exclude_top(crew, odds, a.xtc_threshold[row], work);
    cut = {};
    weigh(crew, odds, cut, work);
  }
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

// Notes what the rows chose in the state of their slots. A row counts only if its parent counts, and chose the id that
// had been drafted; so the rows of a slot that count are each the parent of the next. By one thread, when all rows are
// sampled.
inline void keep_chosen(const SampleArgs& a) {
  i64 last = -1;  // the last row that counts
  for (i64 row = 0; row < a.step->num_rows; ++row) {
    const i32 slot = a.seq_slots[row];
    const i64 parent = parent_of(a, row);
    if (parent >= 0 && (parent != last || a.failed[parent] || a.token_ids[parent] != drafted(a, row))) continue;
    last = row;
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
