// LoRA adapters: what each row's adapter adds to a product, B (A x), where A and B are small.
#pragma once
#include "inferc_abi.h"
#include "rows.h"

namespace inferc {

constexpr i64 LORA_ROWS = 8;       // rows of one piece: those of one adapter read its matrices together
constexpr i64 LORA_RANKS = 16;     // outputs of a shrinking piece
constexpr i64 LORA_COLUMNS = 512;  // of an expanding piece

// The adapters of a step's rows.
struct StepAdapters {
  const InfercAdapter* table;
  const i32* ids;     // the adapter of each token; null: no token has one
  const i32* tokens;  // the token of each row; null: it is the row itself
  INLINE i32 of(i64 row) const { return ids[tokens ? tokens[row] : row]; }
};

template <class T>
INLINE Rows<T> shifted_columns(Rows<T> value, i64 columns) {
  return {value.data + columns, value.stride};
}

// Several steps of a dot product along k at once.
template <class T>
struct Along {
  static constexpr i64 width = LANES;
  static INLINE Vec step(Vec sum, const T* a, const T* b) { return fma(load(a), load(b), sum); }
};
#if defined(__AVX512BF16__)
template <>
struct Along<bf16> {
  static constexpr i64 width = 2 * LANES;
  static INLINE Vec step(Vec sum, const bf16* a, const bf16* b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b))};
  }
};
#endif

// Computes J outputs of N rows: out[n][j] = a[j] . x[n], all over k in the same order.
template <int N, int J, class T>
INLINE void lora_dots(const T* a, i64 k, Rows<const T> x, Rows<float> out) {
  Vec sums[N][J];
  for (int n = 0; n < N; ++n)
    for (int j = 0; j < J; ++j) sums[n][j] = zero();
  i64 at = 0;
  for (; at + Along<T>::width <= k; at += Along<T>::width)
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < J; ++j) sums[n][j] = Along<T>::step(sums[n][j], a + j * k + at, x[n] + at);
  for (; at < k; at += LANES)
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < J; ++j)
        sums[n][j] = fma(load(a + j * k + at, k - at), load(x[n] + at, k - at), sums[n][j]);
  for (int n = 0; n < N; ++n)
    for (int j = 0; j < J; ++j) out[n][j] = sum(sums[n][j]);
}
template <int N, class T>
INLINE void lora_rows_shrink(const T* a, i64 k, i64 ranks, Rows<const T> x, Rows<float> out) {
  i64 j = 0;
  for (; j + 4 <= ranks; j += 4) lora_dots<N, 4>(a + j * k, k, x, shifted_columns(out, j));
  for (; j < ranks; ++j) lora_dots<N, 1>(a + j * k, k, x, shifted_columns(out, j));
}

// Adds to N rows of y, from column 0 on: y[n] += sum over j of h[n][j] * b[j], in the order of j.
template <int N, class T, class O>
INLINE void lora_rows_expand(const T* b, i64 width, i64 ranks, i64 columns, Rows<const float> h, Rows<O> y) {
  each_vector(columns, [&](i64 i, auto count) {
    Vec sums[N];
    for (int n = 0; n < N; ++n) sums[n] = load(y[n] + i, count);
    for (i64 j = 0; j < ranks; ++j) {
      const Vec row = load(b + j * width + i, count);
      for (int n = 0; n < N; ++n) sums[n] = fma(set1(h[n][j]), row, sums[n]);
    }
    for (int n = 0; n < N; ++n) store(y[n] + i, sums[n], count);
  });
}

// Calls f(row, count, adapter) for the rows [begin, end) that have an adapter: 4, 2 or 1 neighbours with the same one.
template <class F>
INLINE void each_adapted(const StepAdapters& adapters, i64 begin, i64 end, F f) {
  for (i64 row = begin; row < end;) {
    const i32 id = adapters.of(row);
    i64 last = row + 1;
    while (last < end && last < row + 4 && adapters.of(last) == id) ++last;
    const i64 count = last - row == 3 ? 2 : last - row;
    if (id) f(row, count, adapters.table[id]);
    row += count;
  }
}

// out [rows, sites * most]: A x of each row for each of the sites that read x; nothing where a row has no adapter, or
// where its rank is smaller.
template <class T>
KERNEL void lora_shrink(Team& team, Rows<const T> x, i64 rows, i64 k, StepAdapters adapters, i64 first, i64 sites,
                        i64 most, Rows<float> out) {
  if (!adapters.ids) return;
  const i64 blocks = (rows + LORA_ROWS - 1) / LORA_ROWS, pieces = (most + LORA_RANKS - 1) / LORA_RANKS;
  team.each(blocks * sites * pieces, 1, [&](i64 begin, i64 end) {
    for (i64 at = begin; at < end; ++at) {
      const i64 low = at % pieces * LORA_RANKS, site = at / pieces % sites, row = at / pieces / sites * LORA_ROWS;
      each_adapted(adapters, row, row + LORA_ROWS < rows ? row + LORA_ROWS : rows,
                   [&](i64 from, i64 count, const InfercAdapter& adapter) {
                     const i64 left = adapter.ranks[first + site] - low;
                     if (left <= 0) return;
                     const i64 ranks = left < LORA_RANKS ? left : LORA_RANKS;
                     const T* a = static_cast<const T*>(adapter.data) + adapter.down[first + site] + low * k;
                     const Rows<const T> in{x[from], x.stride};
                     const Rows<float> to{out[from] + site * most + low, out.stride};
                     if (count == 4) lora_rows_shrink<4>(a, k, ranks, in, to);
                     else if (count == 2) lora_rows_shrink<2>(a, k, ranks, in, to);
                     else lora_rows_shrink<1>(a, k, ranks, in, to);
                   });
    }
  });
}

// out [rows, most]: the row of A of each token, which is stored by tokens.
template <class T>
KERNEL void lora_lookup(Team& team, const i32* token_ids, i64 rows, StepAdapters adapters, i64 site, Rows<float> out) {
  if (!adapters.ids) return;
  team.each(rows, 16, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      const i32 id = adapters.of(row);
      if (!id) continue;
      const InfercAdapter& adapter = adapters.table[id];
      const i64 rank = adapter.ranks[site];
      const T* from = static_cast<const T*>(adapter.data) + adapter.down[site] + token_ids[row] * rank;
      each_vector(rank, [&](i64 i, auto count) { store(out[row] + i, load(from + i, count), count); });
    }
  });
}

// The columns of y that the sites of one product add to.
struct LoraColumns {
  i64 begin, end;
};

// y [rows, …] += B h of each row, for each of the sites; h [rows, sites * most] is what lora_shrink made.
template <class T, class O>
KERNEL void lora_expand(Team& team, Rows<const float> h, i64 rows, StepAdapters adapters, i64 first, i64 most,
                        std::initializer_list<LoraColumns> sites, Rows<O> y) {
  if (!adapters.ids) return;
  const i64 blocks = (rows + LORA_ROWS - 1) / LORA_ROWS;
  i64 pieces = 0;
  for (const LoraColumns& site : sites) pieces += (site.end - site.begin + LORA_COLUMNS - 1) / LORA_COLUMNS;
  team.each(blocks * pieces, 1, [&](i64 begin, i64 end) {
    for (i64 at = begin; at < end; ++at) {
      i64 piece = at % pieces, site = 0;
      const i64 row = at / pieces * LORA_ROWS;
      const LoraColumns* columns = sites.begin();
      for (;; ++site, ++columns) {
        const i64 own = (columns->end - columns->begin + LORA_COLUMNS - 1) / LORA_COLUMNS;
        if (piece < own) break;
        piece -= own;
      }
      const i64 width = columns->end - columns->begin, low = piece * LORA_COLUMNS;
      const i64 count_columns = width - low < LORA_COLUMNS ? width - low : LORA_COLUMNS;
      each_adapted(adapters, row, row + LORA_ROWS < rows ? row + LORA_ROWS : rows,
                   [&](i64 from, i64 count, const InfercAdapter& adapter) {
                     const i64 rank = adapter.ranks[first + site];
                     if (!rank) return;
                     const T* b = static_cast<const T*>(adapter.data) + adapter.up[first + site] + low;
                     const Rows<const float> in{h[from] + site * most, h.stride};
                     const Rows<O> to{y[from] + columns->begin + low, y.stride};
                     if (count == 4) lora_rows_expand<4>(b, width, rank, count_columns, in, to);
                     else if (count == 2) lora_rows_expand<2>(b, width, rank, count_columns, in, to);
                     else lora_rows_expand<1>(b, width, rank, count_columns, in, to);
                   });
    }
  });
}

}  // namespace inferc
