// Mixture of experts: routing, and the experts' SwiGLU over tokens sorted by expert.
#pragma once
#include "rows.h"

namespace inferc {

constexpr i64 MAX_EXPERTS = 1024;

// Softmax over the experts, the top_k largest in falling order, equal ones by rising id.
template <class T>
void moe_routing(Team& team, Rows<const T> logits, i64 rows, i64 experts, i64 top_k, bool renormalize, Rows<i32> ids,
                 Rows<float> weights) {
  team.each(rows, 4, [&](i64 begin, i64 end) {
    alignas(64) float p[MAX_EXPERTS + LANES];
    for (i64 row = begin; row < end; ++row) {
      float top = to_float(logits[row][0]), total = 0.0f, chosen = 0.0f;
      for (i64 e = 1; e < experts; ++e) top = fmaxf(top, to_float(logits[row][e]));
      for (i64 e = 0; e < experts; e += LANES)
        store(p + e, exp(sub(load(logits[row] + e, experts - e), set1(top))));
      for (i64 e = 0; e < experts; ++e) total += p[e];
      for (i64 e = 0; e < experts; ++e) p[e] /= total;
      for (i64 k = 0; k < top_k; ++k) {
        i64 best = 0;
        for (i64 e = 1; e < experts; ++e)
          if (p[e] > p[best]) best = e;
        ids[row][k] = i32(best);
        weights[row][k] = p[best];
        chosen += p[best];
        p[best] = -1.0f;
      }
      if (renormalize)
        for (i64 k = 0; k < top_k; ++k) weights[row][k] /= chosen;
    }
  });
}

template <class T>
struct Experts {
  Rows<const T> x;  // [rows, hidden]
  Rows<const i32> ids;
  Rows<const float> weights;  // [rows, top_k]
  const T *gate_up, *down;    // panels of [experts, 2 * inter, hidden] and [experts, hidden, inter]
  i64 rows, top_k, experts, hidden, inter;
  Rows<T> out;
  char* work;  // moe_work_bytes(…) of scratch

  INLINE Panels<T> gate_up_of(i64 expert) const { return part(gate_up, expert, 2 * inter, hidden); }
  INLINE Panels<T> down_of(i64 expert) const { return part(down, expert, hidden, inter); }
  static INLINE Panels<T> part(const T* data, i64 expert, i64 n, i64 k) {
    Panels<T> one{data, n, k};
    one.data += expert * (one.panel(one.count()) - one.panel(0));
    return one;
  }
};

// Scratch of moe_experts, in this order: activations [rows * top_k, inter] T, sums [rows, hidden] float32,
// choices [rows * top_k] i32 sorted by expert, starts [experts + 1] i32. emit.py computes the same.
template <class T>
struct ExpertWork {
  T* active;
  float* sums;
  i32 *choices, *starts;
  explicit ExpertWork(const Experts<T>& m) {
    auto padded = [](i64 bytes) { return (bytes + 63) / 64 * 64; };
    active = reinterpret_cast<T*>(m.work);
    char* at = m.work + padded(m.rows * m.top_k * m.inter * i64(sizeof(T)));
    sums = reinterpret_cast<float*>(at);
    at += padded(m.rows * m.hidden * 4);
    choices = reinterpret_cast<i32*>(at);
    starts = reinterpret_cast<i32*>(at + padded(m.rows * m.top_k * 4));
  }
};

template <class T>
void sort_by_expert(const Experts<T>& m, const ExpertWork<T>& work) {
  memset(work.starts, 0, (m.experts + 1) * 4);
  i32 next[MAX_EXPERTS];
  for (i64 i = 0; i < m.rows * m.top_k; ++i) ++work.starts[m.ids[i / m.top_k][i % m.top_k] + 1];
  for (i64 e = 0; e < m.experts; ++e) next[e] = work.starts[e], work.starts[e + 1] += work.starts[e];
  for (i64 i = 0; i < m.rows * m.top_k; ++i) work.choices[next[m.ids[i / m.top_k][i % m.top_k]]++] = i32(i);
}

// silu(gate) * up of the choices [first, last) of one expert, for four panels of columns.
template <class T>
void activate(const Experts<T>& m, const ExpertWork<T>& work, i64 expert, i64 first, i64 last, i64 panel) {
  Panels<T> w = m.gate_up_of(expert);
  i64 end = panel + 4 < m.inter / 16 ? panel + 4 : m.inter / 16;
  alignas(64) float gate[BLOCK_ROWS * 64];
  auto row_of = [&](i64 row) { return m.x[work.choices[first + row] / m.top_k]; };
  gemm_panels<T>(w, panel, end, last - first, row_of,
                 [&](i64 row, i64 p, Vec acc) { store(gate + row * 64 + (p - panel) * 16, rounded<T>(acc)); });
  i64 shift = m.inter / 16;
  gemm_panels<T>(w, shift + panel, shift + end, last - first, row_of, [&](i64 row, i64 p, Vec acc) {
    Vec value = mul(silu(load(gate + row * 64 + (p - shift - panel) * 16)), rounded<T>(acc));
    store(work.active + (first + row) * m.inter + (p - shift) * 16, value);
  });
}

// Adds the experts' results for four panels of columns: a column belongs to one thread, experts go in rising id.
template <class T>
void combine(const Experts<T>& m, const ExpertWork<T>& work, i64 panel, i64 end) {
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
            Vec share = mul(rounded<T>(acc), set1(m.weights[token][choice % m.top_k]));
            store(sum, add(load(sum, n), share), n);
          });
    }
  for (i64 row = 0; row < m.rows; ++row)
    for (i64 i = 0; i < width; i += LANES)
      store(m.out[row] + column + i, load(work.sums + row * m.hidden + column + i, width - i), width - i);
}

template <class T>
void moe_experts(Team& team, const Experts<T>& m) {
  ExpertWork<T> work(m);
  if (team.tid == 0) sort_by_expert(m, work);
  team.barrier();
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
