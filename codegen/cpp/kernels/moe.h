// Mixture of experts: routing, and the gated experts over tokens sorted by expert.
#pragma once
#include "int4.h"
#include "quantize.h"

namespace inferc {

constexpr i64 MAX_EXPERTS = 1024;

enum Score { SOFTMAX, SIGMOID, CHOSEN_SOFTMAX, CHOSEN_SIGMOID, NEAR_SOFTMAX };
enum GroupScore { MAX, TOP2_SUM };

// The parameters of scoring and choosing experts: see ops/experts.py.
struct Routing {
  Score score;
  GroupScore group_score;
  i64 experts, top_k, groups, kept_groups;
  bool renormalize;
  float scale, margin;
};

// Takes the best `count` values, in descending order, equal ones by ascending index; those taken become -inf.
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

// The softmax of the best expert over the experts near it that can still be chosen.
INLINE float near_softmax(const Routing& r, const float* choice, i64 best) {
  float top = choice[best], total = 0.0f;
  for (i64 e = 0; e < r.experts; ++e) {
    bool is_far = (top - choice[e]) / fmaxf(fabsf(choice[e]), top) > r.margin;
    if (choice[e] > -__builtin_inff() && !is_far) total += first(exp(set1(choice[e] - top)));
  }
  return 1.0f / total;
}

// Excludes the experts outside of the best groups from the choice.
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
KERNEL void moe_routing(Team& team, Rows<const T> logits, const B* bias, i64 rows, Routing r, Rows<i32> ids,
                        Rows<float> weights) {
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
        weights[row][k] = r.score == NEAR_SOFTMAX ? near_softmax(r, choice, best) : scores[best];
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

// A matrix of every expert, n outputs over k. W is the stored type: T, int8 with a scale for each output, or u8, which
// is four bits with an integer scale for each group of k as well.
template <class T, class W>
struct ExpertMatrix {
  const W* data;   // [experts, n, k] in panels
  const T* bias;   // [experts, n] or null
  i64 n, k;
  const float* scale = nullptr;     // [experts, n]
  const i8* group_scale = nullptr;  // in panels [experts, n, groups]
  i64 group = 0;

  INLINE auto of(i64 expert) const {
    if constexpr (std::is_same_v<W, u8>) {
      Int4Panels all{data, group_scale, n, k, group};
      return Int4Panels{all.panel(expert * all.count()), all.scales(expert * all.count()), n, k, group};
    } else {
      Panels<W> all{data, n, k};
      return Panels<W>{all.panel(expert * all.count()), n, k};
    }
  }
  INLINE i64 panels() const { return (n + 15) / 16; }  // panels of an expert; those of the next expert follow
  // Multiplies one expert's panels [begin, end) by `rows` rows of X, at most BLOCK_ROWS; emit(row, panel, 16 outputs).
  // row_of(i) is a row's address, scale_of(i) its scale where X is int8. after: the panel that the thread multiplies
  // next, which may be a later expert's, or -1. The arithmetic is that of the linear kernel with such operands.
  template <class X, class R, class S, class E>
  INLINE void multiply(i64 expert, i64 begin, i64 end, i64 after, i64 rows, R row_of, S scale_of, E emit) const {
    auto write = [&](i64 row, i64 panel, auto acc) {
      Vec sums;
      if constexpr (std::is_same_v<X, i8>) sums = mul(to_float(acc), set1(scale_of(row)));
      else sums = acc;
      emit(row, panel, finished(sums, scale, bias, expert * n + panel * 16, n - panel * 16));
    };
    if constexpr (std::is_same_v<W, u8>) int4_panels(of(expert), begin, end, after, rows, row_of, write);
    else gemm_panels<X>(of(expert), begin, end, after, rows, row_of, write);
  }
};

// X: the type in which rows are multiplied, T or int8 with a scale each. With int8 the activations are quantized too.
template <class T, class W = T, class X = T>
struct Experts {
  static constexpr bool quantizes = !std::is_same_v<T, X>;
  Rows<const X> x;            // [rows, hidden]
  Rows<const float> x_scale;  // [rows, 1], of int8
  Rows<const i32> ids;
  Rows<const float> weights;        // [rows, top_k]
  ExpertMatrix<T, W> gate_up, down; // 2 * inter over hidden, hidden over inter
  Activation activation;
  float alpha, limit;
  bool scale_input;  // the routing weight multiplies an expert's input, not its result
  i64 rows, top_k, experts, hidden, inter;
  Rows<T> out;
  char* work;  // moe_work_bytes(…) of scratch

  INLINE Vec active(Vec gate, Vec up) const {
    if (activation == SILU) return mul(silu(gate), up);
    if (activation == GELU) return mul(gelu(gate), up);
    if (activation == GELU_TANH) return mul(gelu_tanh(gate), up);
    gate = min(gate, set1(limit));
    up = max(min(up, set1(limit)), set1(-limit));
    return mul(mul(gate, sigmoid(mul(gate, set1(alpha)))), add(up, set1(1.0f)));
  }
  INLINE bool scales_rows() const { return scale_input && !quantizes; }  // int8 rows: the weight multiplies their scale
};

// The scratch of moe_experts, in this order: activations [rows * top_k, inter] T, with int8 their quantized form and
// scales [rows * top_k] float32, scaled inputs [rows * top_k, hidden] T if there are any, sums [rows, hidden] float32,
// choices [rows * top_k] i32 sorted by expert, starts [experts + 1] i32. moe_work_bytes (calls/moe.py) gives its size.
template <class T, class W, class X>
struct ExpertWork {
  T *active, *scaled = nullptr;
  i8* quantized = nullptr;
  float *scales = nullptr, *sums;
  i32 *choices, *starts;
  explicit ExpertWork(const Experts<T, W, X>& m) {
    const i64 all = m.rows * m.top_k;
    char* at = m.work;
    active = take<T>(at, all * m.inter);
    if (m.quantizes) quantized = take<i8>(at, all * m.inter), scales = take<float>(at, all);
    if (m.scales_rows()) scaled = take<T>(at, all * m.hidden);
    sums = take<float>(at, m.rows * m.hidden);
    choices = take<i32>(at, all);
    starts = take<i32>(at, m.experts + 1);
  }
};

// A choice with id -1 is another rank's, and does not appear here.
template <class T, class W, class X>
void sort_by_expert(const Experts<T, W, X>& m, const ExpertWork<T, W, X>& work) {
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

// The next expert that was chosen, or `experts`.
INLINE i64 next_chosen(const i32* starts, i64 experts, i64 expert) {
  do ++expert;
  while (expert < experts && starts[expert] == starts[expert + 1]);
  return expert;
}

// Hands out `panels` of every expert's choices, four or a small multiple at a time, with at most BLOCK_ROWS rows:
// f(expert, first choice, last, first panel, end, the expert whose first panel the thread multiplies next or -1).
// Consecutive panels go to one thread: whenever its stream of weights breaks off, the next one begins with a memory
// latency.
template <class T, class W, class X, class F>
INLINE void each_block(Team& team, const Experts<T, W, X>& m, const ExpertWork<T, W, X>& work, i64 panels, F f) {
  const i64 groups = (panels + 3) / 4;
  auto blocks = [&](i64 e) { return (work.starts[e + 1] - work.starts[e] + BLOCK_ROWS - 1) / BLOCK_ROWS; };
  // Items below `limit` belong to experts up to `expert`, whose items start at `base`.
  i64 items = 0, expert = -1, base = 0, limit = 0;
  for (i64 e = 0; e < m.experts; ++e) items += blocks(e) * groups;
  const i64 grain = items / (team.count * 8);
  team.each(items, grain < 1 ? 1 : grain < 4 ? grain : 4, [&](i64 item, i64 end) {
    while (item < end) {
      while (item >= limit) base = limit, limit += blocks(++expert) * groups;
      const i64 first = work.starts[expert] + (item - base) / groups * BLOCK_ROWS, stop = work.starts[expert + 1];
      const i64 group = (item - base) % groups, count = groups - group < end - item ? groups - group : end - item;
      const i64 last = (group + count) * 4 < panels ? (group + count) * 4 : panels;
      item += count;
      const i64 after = item == limit && item < end ? next_chosen(work.starts, m.experts, expert) : -1;
      f(expert, first, first + BLOCK_ROWS < stop ? first + BLOCK_ROWS : stop, group * 4, last, after);
    }
  });
}

// Computes the activation of the choices [first, last) of one expert for the panels [panel, end) of columns: as many at
// a time as there is room for their gates, but at least four. after: the expert that comes next, or -1.
template <class T, class W, class X>
void activate(const Experts<T, W, X>& m, const ExpertWork<T, W, X>& work, i64 expert, i64 first, i64 last, i64 panel,
              i64 end, i64 after) {
  const i64 shift = m.inter / 16, at_once = BLOCK_ROWS / (last - first) * 4;
  alignas(64) float gate[BLOCK_ROWS * 64];
  auto row_of = [&](i64 row) -> const X* {
    if constexpr (std::is_same_v<T, X>)
      if (m.scale_input) return work.scaled + (first + row) * m.hidden;
    return m.x[work.choices[first + row] / m.top_k];
  };
  auto scale_of = [&](i64 row) {
    const i64 choice = work.choices[first + row], token = choice / m.top_k;
    return *m.x_scale[token] * (m.scale_input ? m.weights[token][choice % m.top_k] : 1.0f);
  };
  for (; panel < end; panel += at_once) {
    const i64 stop = panel + at_once < end ? panel + at_once : end, width = (stop - panel) * 16;
    auto multiply = [&](i64 begin, i64 next, auto emit) {
      m.gate_up.template multiply<X>(expert, begin + panel, begin + stop, next, last - first, row_of, scale_of, emit);
    };
    multiply(0, shift + panel,
             [&](i64 row, i64 p, Vec sums) { store(gate + row * width + (p - panel) * 16, rounded<T>(sums)); });
    const i64 next = stop < end ? stop : after < 0 ? -1 : (after - expert) * m.gate_up.panels();
    multiply(shift, next, [&](i64 row, i64 p, Vec sums) {
      Vec value = m.active(load(gate + row * width + (p - shift - panel) * 16), rounded<T>(sums));
      store(work.active + (first + row) * m.inter + (p - shift) * 16, value);
    });
  }
}

// Computes the shares of the choices [first, last) of one expert in their tokens' results: emit(token, panel, share).
template <class T, class W, class X, class E>
INLINE void shares(const Experts<T, W, X>& m, const ExpertWork<T, W, X>& work, i64 expert, i64 first, i64 last,
                   i64 panel, i64 end, E emit) {
  auto row_of = [&](i64 row) -> const X* {
    if constexpr (std::is_same_v<T, X>) return work.active + (first + row) * m.inter;
    else return work.quantized + (first + row) * m.inter;
  };
  auto scale_of = [&](i64 row) { return work.scales[first + row]; };
  const i64 next = next_chosen(work.starts, m.experts, expert);
  const i64 after = next < m.experts ? (next - expert) * m.down.panels() + panel : -1;
  m.down.template multiply<X>(expert, panel, end, after, last - first, row_of, scale_of,
                              [&](i64 row, i64 p, Vec result) {
                                const i64 choice = work.choices[first + row], token = choice / m.top_k;
                                const float weight = m.scale_input ? 1.0f : m.weights[token][choice % m.top_k];
                                emit(token, p, mul(rounded<T>(result), set1(weight)));
                              });
}

// The groups of four panels of a result that go to a thread at a time. For few rows, whose sums stay in the first-level
// cache, these are all of its groups, so that what it reads of an expert is contiguous.
template <class T, class W, class X>
INLINE i64 combined_groups(const Team& team, const Experts<T, W, X>& m) {
  const i64 groups = (m.hidden + 63) / 64, share = groups / team.count, fits = 128 / (m.rows + 1);
  const i64 most = share < fits ? share : fits;
  return most < 1 ? 1 : most;
}

// A token's shares are added in ascending order of experts by any thread: a column of sums belongs to one thread.
template <class T, class W, class X>
void combine(Team& team, const Experts<T, W, X>& m, const ExpertWork<T, W, X>& work) {
  const i64 panels = (m.hidden + 15) / 16;
  team.each((panels + 3) / 4, combined_groups(team, m), [&](i64 group, i64 last_group) {
    const i64 panel = group * 4, end = last_group * 4 < panels ? last_group * 4 : panels;
    const i64 column = panel * 16, stop = end * 16 < m.hidden ? end * 16 : m.hidden;
    for (i64 row = 0; row < m.rows; ++row) memset(work.sums + row * m.hidden + column, 0, (stop - column) * 4);
    for (i64 expert = 0; expert < m.experts; ++expert)
      for (i64 first = work.starts[expert], last = work.starts[expert + 1]; first < last; first += BLOCK_ROWS)
        shares(m, work, expert, first, first + BLOCK_ROWS < last ? first + BLOCK_ROWS : last, panel, end,
               [&](i64 token, i64 p, Vec share) {
                 float* sum = work.sums + token * m.hidden + p * 16;
                 store(sum, add(load(sum, m.hidden - p * 16), share), m.hidden - p * 16);
               });
    for (i64 row = 0; row < m.rows; ++row)
      for (i64 i = column; i < stop; i += LANES)
        store(m.out[row] + i, load(work.sums + row * m.hidden + i, stop - i), stop - i);
  });
}

// The memory that a thread reads first in `combine`.
template <class T, class W, class X>
INLINE Ahead first_combined(const Team& team, const Experts<T, W, X>& m, const ExpertWork<T, W, X>& work) {
  if (work.starts[m.experts] == 0) return {};
  const i64 first = work.choices[0], panels = combined_groups(team, m) * 4;
  const auto down = m.down.of(m.ids[first / m.top_k][first % m.top_k]);
  return {down.panel(team.tid * panels), bytes_between(down.panel(0), down.panel(panels))};
}

template <class T, class W>
void scale_inputs(Team& team, const Experts<T, W, T>& m, const ExpertWork<T, W, T>& work) {
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

template <class T, class W, class X>
KERNEL void moe_experts(Team& team, const Experts<T, W, X>& m) {
  ExpertWork<T, W, X> work(m);
  if (team.tid == 0) sort_by_expert(m, work);
  team.barrier();
  if constexpr (std::is_same_v<T, X>)
    if (m.scale_input) scale_inputs(team, m, work);
  each_block(team, m, work, m.inter / 16, [&](i64 expert, i64 first, i64 last, i64 panel, i64 end, i64 after) {
    activate(m, work, expert, first, last, panel, end, after);
  });
  const Ahead ahead = first_combined(team, m, work);
  team.barrier(ahead);
  if (m.quantizes) {
    const i64 choices = work.starts[m.experts];
    quantize_rows<T>(team, {work.active, m.inter}, choices, m.inter, {work.quantized, m.inter}, {work.scales, 1});
    team.barrier(ahead);
  }
  combine(team, m, work);
}

}  // namespace inferc
