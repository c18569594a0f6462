// The collectives of ranks, made by the host: thread 0 calls it on contiguous rows while the other threads wait.
#pragma once
#include "step.h"

namespace inferc {

template <class T>
INLINE void sum_over_ranks(Team& team, const Step& s, Rows<T> value, i64 rows, i64 width, i32 group) {
  constexpr i32 op = sizeof(T) == 4 ? INFERC_ALL_REDUCE_F32 : INFERC_ALL_REDUCE_BF16;
  team.barrier();
  if (team.tid == 0) {
    const Waiting ranks;
    s.host->collective(s.host->context, op, group, value.data, rows * width);
  }
  team.barrier();
}

// Only `out` must be contiguous: it has a place of its own.
template <class T>
KERNEL void all_reduce(Team& team, const Step& s, Rows<const T> x, i64 rows, i64 width, i32 group, Rows<T> out) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) memcpy(out[row], x[row], width * sizeof(T));
  });
  sum_over_ranks<T>(team, s, out, rows, width, group);
}

// Puts the x of all ranks side by side: `parts` columns of each. Other ranks' columns are zero here, so the sum is
// exact.
template <class T, size_t N>
KERNEL void all_gather(Team& team, const Step& s, Rows<const T> x, i64 rows, const i64 (&parts)[N], i64 width,
                       i32 group, Rows<T> out) {
  i64 rank = s.host->ranks[group], first = 0, part = parts[rank];
  for (i64 before = 0; before < rank; ++before) first += parts[before];
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      memset(out[row], 0, width * sizeof(T));
      memcpy(out[row] + first, x[row], part * sizeof(T));
    }
  });
  sum_over_ranks<T>(team, s, out, rows, width, group);
}

// The hidden rows of the previous pipeline stage, and those for the next one: contiguous at the host.
template <class T>
KERNEL void hidden_in(Team& team, const Step& s, i64 rows, i64 width, Rows<T> out) {
  const T* from = static_cast<const T*>(s.a.hidden_in);
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) memcpy(out[row], from + row * width, width * sizeof(T));
  });
}
template <class T>
KERNEL void hidden_out(Team& team, const Step& s, Rows<const T> x, i64 rows, i64 width) {
  T* to = static_cast<T*>(s.a.hidden_out);
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) memcpy(to + row * width, x[row], width * sizeof(T));
  });
}

}  // namespace inferc
