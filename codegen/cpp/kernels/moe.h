// Mixture of experts: routing, and the gated experts over tokens sorted by expert.
#pragma once
#include "rows.h"

namespace inferc {

constexpr i64 MAX_EXPERTS = 1024;

enum Score { SOFTMAX, SIGMOID, CHOSEN_SOFTMAX, CHOSEN_SIGMOID };
enum GroupScore { MAX, TOP2_SUM };

// How experts are scored and chosen: see ops/experts.py.
struct Routing {
  Score score;
  GroupScore group_score;
  i64 experts, top_k, groups, kept_groups;
  bool renormalize;
  float scale;
};

// The best `count` of values, falling, equal ones by rising index; those taken become -inf.
template <class F>
INLINE void take_best(float* values, i64 size, i64 count, F take) {
  for (i64 k = 0; k < count; ++k) {
    i64 best = 0;
    for (i64 i = 1; i < size; ++i)
      if (values[i] > values[best]) best = i;
    take(k, best);
    values[best] = -__builtin_inff();
  }
}

// p[i] = softmax of p over `count`.
INLINE void softmax(float* p, i64 count) {
  float top = p[0], total = 0.0f;
  for (i64 i = 1; i < count; ++i) top = fmaxf(top, p[i]);
  for (i64 i = 0; i < count; i += LANES) store(p + i, exp(sub(load(p + i, count - i), set1(top))), count - i);
  for (i64 i = 0; i < count; ++i) total += p[i];
  for (i64 i = 0; i < count; ++i) p[i] /= total;
}

// Experts outside of the best groups are no choice any more.
INLINE void drop_groups(const Routing& r, float* choice) {
  float best[MAX_EXPERTS];
  bool kept[MAX_EXPERTS] = {};
  i64 size = r.experts / r.groups;
  for (i64 g = 0; g < r.groups; ++g) {
    float first = -__builtin_inff(), second = first;
    for (i64 e = g * size; e < (g + 1) * size; ++e) {
      if (choice[e] > first) second = first, first = choice[e];
      else if (choice[e] > second) second = choice[e];
    }
    best[g] = r.group_score == MAX ? first : first + second;
  }
  take_best(best, r.groups, r.kept_groups, [&](i64, i64 group) { kept[group] = true; });
  for (i64 e = 0; e < r.experts; ++e)
    if (!kept[e / size]) choice[e] = -__builtin_inff();
}

template <class T, class B>
void moe_routing(Team& team, Rows<const T> logits, const B* bias, i64 rows, Routing r, Rows<i32> ids, Rows<float> weights) {
  team.each(rows, 4, [&](i64 begin, i64 end) {
    alignas(64) float scores[MAX_EXPERTS], choice[MAX_EXPERTS];
    for (i64 row = begin; row < end; ++row) {
      for (i64 e = 0; e < r.experts; e += LANES) {
        Vec x = load(logits[row] + e, r.experts - e);
        store(scores + e, r.score == SIGMOID ? sigmoid(x) : x, r.experts - e);
      }
      if (r.score == SOFTMAX) softmax(scores, r.experts);
      for (i64 e = 0; e < r.experts; ++e) choice[e] = bias ? scores[e] + to_float(bias[e]) : scores[e];
      if (r.groups > 1) drop_groups(r, choice);
      float total = 0.0f;
      take_best(choice, r.experts, r.top_k, [&](i64 k, i64 best) {
        ids[row][k] = i32(best);
        weights[row][k] = scores[best];
        total += scores[best];
      });
      if (r.score == CHOSEN_SOFTMAX) softmax(weights[row], r.top_k);
      if (r.score == CHOSEN_SIGMOID)
        for (i64 k = 0; k < r.top_k; ++k) weights[row][k] = first(sigmoid(set1(weights[row][k])));
      for (i64 k = 0; k < r.top_k; ++k) weights[row][k] = weights[row][k] / (r.renormalize ? total : 1.0f) * r.scale;
    }
  });
}

enum Activation { SILU, GELU, GELU_TANH, SWIGLU_CLAMPED };

// W: what the weights are stored in, T or int8 with scales.
template <class T, class W = T>
struct Experts {
  Rows<const T> x;  // [rows, hidden]
  Rows<const i32> ids;
  Rows<const float> weights;  // [rows, top_k]
  const W *gate_up, *down;    // panels of [experts, 2 * inter, hidden] and [experts, hidden, inter]
  const T *gate_up_bias, *down_bias;  // [experts, 2 * inter] and [experts, hidden], or null
  Activation activation;
  float alpha, limit;
  bool scale_input;  // the weight multiplies an expert's input, not its result
  i64 rows, top_k, experts, hidden, inter;
  Rows<T> out;
  char* work;  // moe_work_bytes(…) of scratch
  const float *gate_up_scale = nullptr, *down_scale = nullptr;  // [experts, 2 * inter] and [experts, hidden], of int8

  INLINE Vec active(Vec gate, Vec up) const {
    if (activation == SILU) return mul(silu(gate), up);
    if (activation == GELU) return mul(gelu(gate), up);
    if (activation == GELU_TANH) return mul(gelu_tanh(gate), up);
    gate = min(gate, set1(limit));
    up = max(min(up, set1(limit)), set1(-limit));
    return mul(mul(gate, sigmoid(mul(gate, set1(alpha)))), add(up, set1(1.0f)));
  }
  INLINE Panels<W> gate_up_of(i64 expert) const { return part(gate_up, expert, 2 * inter, hidden); }
  INLINE Panels<W> down_of(i64 expert) const { return part(down, expert, hidden, inter); }
  static INLINE Panels<W> part(const W* data, i64 expert, i64 n, i64 k) {
    Panels<W> one{data, n, k};
    one.data += expert * (one.panel(one.count()) - one.panel(0));
    return one;
  }
};

// Scratch of moe_experts, in this order: activations [rows * top_k, inter] T, scaled inputs [rows * top_k, hidden] T if
// there are any, sums [rows, hidden] float32, choices [rows * top_k] i32 sorted by expert, starts [experts + 1] i32. emit.py computes the same.
template <class T>
struct ExpertWork {
  T *active, *scaled;
  float* sums;
  i32 *choices, *starts;
  template <class W>
  explicit ExpertWork(const Experts<T, W>& m) {
    auto padded = [](i64 bytes) { return (bytes + 63) / 64 * 64; };
    active = reinterpret_cast<T*>(m.work);
    char* at = m.work + padded(m.rows * m.top_k * m.inter * i64(sizeof(T)));
    scaled = reinterpret_cast<T*>(at);
    if (m.scale_input) at += padded(m.rows * m.top_k * m.hidden * i64(sizeof(T)));
    sums = reinterpret_cast<float*>(at);
    at += padded(m.rows * m.hidden * 4);
    choices = reinterpret_cast<i32*>(at);
    starts = reinterpret_cast<i32*>(at + padded(m.rows * m.top_k * 4));
  }
};

// Choices of id -1 are another rank's, and nowhere in the result.
template <class T, class W>
void sort_by_expert(const Experts<T, W>& m, const ExpertWork<T>& work) {
  memset(work.starts, 0, (m.experts + 1) * 4);
  i32 next[MAX_EXPERTS];
  auto on_choices = [&](auto f) {
    for (i64 row = 0; row < m.rows; ++row)
      for (i64 k = 0; k < m.top_k; ++k)
        if (m.ids[row][k] >= 0) f(m.ids[row][k], i32(row * m.top_k + k));
  };
  on_choices([&](i32 expert, i32) { ++work.starts[expert + 1]; });
  for (i64 e = 0; e < m.experts; ++e) next[e] = work.starts[e], work.starts[e + 1] += work.starts[e];
  on_choices([&](i32 expert, i32 choice) { work.choices[next[expert]++] = choice; });
}

// The activation of the choices [first, last) of one expert, for four panels of columns.
template <class T, class W>
void activate(const Experts<T, W>& m, const ExpertWork<T>& work, i64 expert, i64 first, i64 last, i64 panel) {
  Panels<W> w = m.gate_up_of(expert);
  i64 end = panel + 4 < m.inter / 16 ? panel + 4 : m.inter / 16;
  alignas(64) float gate[BLOCK_ROWS * 64];
  auto row_of = [&](i64 row) -> const T* {
    return m.scale_input ? work.scaled + (first + row) * m.hidden : m.x[work.choices[first + row] / m.top_k];
  };
  gemm_panels<T>(w, panel, end, last - first, row_of,
                 [&](i64 row, i64 p, Vec acc) {
                   acc = finished(acc, m.gate_up_scale, m.gate_up_bias, expert * 2 * m.inter + p * 16, 16);
                   store(gate + row * 64 + (p - panel) * 16, rounded<T>(acc));
                 });
  i64 shift = m.inter / 16;
  gemm_panels<T>(w, shift + panel, shift + end, last - first, row_of, [&](i64 row, i64 p, Vec acc) {
    acc = finished(acc, m.gate_up_scale, m.gate_up_bias, expert * 2 * m.inter + p * 16, 16);
    Vec value = m.active(load(gate + row * 64 + (p - shift - panel) * 16), rounded<T>(acc));
    store(work.active + (first + row) * m.inter + (p - shift) * 16, value);
  });
}

// Adds the experts' results for four panels of columns: a column belongs to one thread, experts go in rising id.
template <class T, class W>
void combine(const Experts<T, W>& m, const ExpertWork<T>& work, i64 panel, i64 end) {
  i64 column = panel * 16, width = (end * 16 < m.hidden ? end * 16 : m.hidden) - column;
  for (i64 row = 0; row < m.rows; ++row) memset(work.sums + row * m.hidden + column, 0, width * 4);
  for (i64 expert = 0; expert < m.experts; ++expert)
    for (i64 first = work.starts[expert]; first < work.starts[expert + 1]; first += BLOCK_ROWS) {
      i64 left = work.starts[expert + 1] - first;
      gemm_panels<T>(
          m.down_of(expert), panel, end, left < BLOCK_ROWS ? left : BLOCK_ROWS,
          [&](i64 row) { return work.active + (first + row) * m.inter; },
          [&](i64 row, i64 p, Vec acc) {
            i64 choice = work.choices[first + row], token = choice / m.top_k, n = m.hidden - p * 16;
            float* sum = work.sums + token * m.hidden + p * 16;
            acc = finished(acc, m.down_scale, m.down_bias, expert * m.hidden + p * 16, n);
            Vec share = mul(rounded<T>(acc), set1(m.scale_input ? 1.0f : m.weights[token][choice % m.top_k]));
            store(sum, add(load(sum, n), share), n);
          });
    }
  for (i64 row = 0; row < m.rows; ++row)
    for (i64 i = 0; i < width; i += LANES)
      store(m.out[row] + column + i, load(work.sums + row * m.hidden + column + i, width - i), width - i);
}

template <class T, class W>
void moe_experts(Team& team, const Experts<T, W>& m) {
  ExpertWork<T> work(m);
  if (team.tid == 0) sort_by_expert(m, work);
  team.barrier();
  if (m.scale_input) {
    team.each(work.starts[m.experts], row_grain(m.hidden), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; ++i) {
        i64 token = work.choices[i] / m.top_k;
        Vec share = set1(m.weights[token][work.choices[i] % m.top_k]);
        for (i64 k = 0; k < m.hidden; k += LANES)
          store(work.scaled + i * m.hidden + k, mul(load(m.x[token] + k, m.hidden - k), share), m.hidden - k);
      }
    });
    team.barrier();
  }
  i64 groups = (m.inter / 16 + 3) / 4, expert = -1, base = 0, items = 0;
  auto blocks = [&](i64 e) { return (work.starts[e + 1] - work.starts[e] + BLOCK_ROWS - 1) / BLOCK_ROWS; };
  for (i64 e = 0; e < m.experts; ++e) items += blocks(e) * groups;
  i64 limit = 0;  // items below it belong to experts up to `expert`; those of `expert` start at base
  team.each(items, 1, [&](i64 item, i64) {
    while (item >= limit) base = limit, limit += blocks(++expert) * groups;
    i64 first = work.starts[expert] + (item - base) / groups * BLOCK_ROWS, stop = work.starts[expert + 1];
    activate(m, work, expert, first, first + BLOCK_ROWS < stop ? first + BLOCK_ROWS : stop, (item - base) % groups * 4);
  });
  team.barrier();
  i64 panels = (m.hidden + 15) / 16;
  team.each((panels + 3) / 4, 1, [&](i64 group, i64) {
    combine(m, work, group * 4, group * 4 + 4 < panels ? group * 4 + 4 : panels);
  });
}

}  // namespace inferc
