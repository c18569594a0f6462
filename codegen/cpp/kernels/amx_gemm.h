// `gemm_panels` on tiles: 32 rows by two panels at a time, four tiles of sums.
// A panel is the product's right side as it lies in memory, rows are its left side. Whatever the number of rows, an
// output adds up tiles of k in ascending order, the last filled up with zeros: a row's bits do not depend on the others.
#pragma once
#include "gemm.h"

namespace inferc {

template <class T>
constexpr i64 TILE_K = TILE_LINE / i64(sizeof(T));
// Of k at a time, in bytes of a row. The tiles of 192 rows and four panels then take half of a 2 MB L2. Smaller blocks,
// for one side to stay in L1, load and store sums more often, which by the rates of L1 and L2 costs as much as it gains.
constexpr i64 TILE_BLOCK = 4096;
// Weights in int8 are widened for so many k at a time: into L1, or for more rows into L2.
constexpr i64 TILE_WIDE_K = 256, TILE_WIDE_K_MANY = 1024;

// One or two tiles of rows: those of k step i start `step` bytes behind those of step i - 1, rows are `stride` bytes apart.
struct RowTiles {
  const char *first, *second;
  i64 stride, step;
  INLINE RowTiles from(i64 i) const { return {first + i * step, second + i * step, stride, step}; }
};

// M tiles of rows times P panels over whole tiles of k: sums[row * stride + p * 16 + lane], started at zero if `fresh`,
// else continued. `ahead`, unless null, is fetched meanwhile, as many bytes as each panel has.
template <class T, int M, int P>
__attribute__((noinline)) void multiply_tiles(const RowTiles& a, const T* const* b, const T* const* ahead, i64 steps,
                                              float* sums, i64 stride, bool fresh) {
  constexpr T* type = nullptr;
  const char *rows = a.first, *more = a.second, *panels[P], *next[P];
  const i64 row_stride = a.stride, row_step = a.step, line = stride * i64(sizeof(float));
  for (int p = 0; p < P; ++p) {
    panels[p] = reinterpret_cast<const char*>(b[p]);
    next[p] = ahead ? reinterpret_cast<const char*>(ahead[p]) : nullptr;
  }
  auto on_sums = [&](auto f) {
    f.template operator()<0, 0>();
    if constexpr (P == 2) f.template operator()<0, 1>();
    if constexpr (M == 2) f.template operator()<1, 0>();
    if constexpr (M == 2 && P == 2) f.template operator()<1, 1>();
  };
  on_sums([&]<int m, int p>() {
    if (fresh) amx::zero<2 * m + p>();
    else amx::load<2 * m + p>(sums + m * TILE_HEIGHT * stride + p * LANES, line);
  });
  for (i64 i = 0; i < steps; ++i) {
    for (int p = 0; p < P && ahead; ++p) {
      for (i64 at = 0; at < TILE_BYTES; at += 64) fetch_l2(next[p] + at);
      next[p] += TILE_BYTES;
    }
    amx::load<4>(rows, row_stride);
    amx::load<6>(panels[0], TILE_LINE);
    amx::dot<0, 4, 6>(type);
    if constexpr (P == 2) {
      amx::load<7>(panels[1], TILE_LINE);
      amx::dot<1, 4, 7>(type);
    }
    if constexpr (M == 2) {
      amx::load<5>(more, row_stride);
      amx::dot<2, 5, 6>(type);
    }
    if constexpr (M == 2 && P == 2) amx::dot<3, 5, 7>(type);
    rows += row_step, more += row_step;
    for (int p = 0; p < P; ++p) panels[p] += TILE_BYTES;
  }
  on_sums([&]<int m, int p>() { amx::store<2 * m + p>(sums + m * TILE_HEIGHT * stride + p * LANES, line); });
}

// The same for up to 32 rows and one or two panels over any k. Its last, no whole tile: `a` goes on with zeros, and
// last[p] has the panel's.
template <class T>
INLINE void tile_product(i64 height, const RowTiles& a, i64 count, const T* const* b, const T* const* last,
                         const T* const* ahead, i64 k, float* sums, i64 stride, bool fresh) {
  auto run = [&](const RowTiles& rows, const T* const* panels, const T* const* next, i64 steps, bool start) {
    if (height > TILE_HEIGHT) {
      if (count > 1) multiply_tiles<T, 2, 2>(rows, panels, next, steps, sums, stride, start);
      else multiply_tiles<T, 2, 1>(rows, panels, next, steps, sums, stride, start);
    } else {
      if (count > 1) multiply_tiles<T, 1, 2>(rows, panels, next, steps, sums, stride, start);
      else multiply_tiles<T, 1, 1>(rows, panels, next, steps, sums, stride, start);
    }
  };
  const i64 steps = k / TILE_K<T>;
  shape_tiles(height < TILE_HEIGHT ? height : TILE_HEIGHT, height > TILE_HEIGHT ? height - TILE_HEIGHT : 0);
  if (steps) run(a, b, ahead, steps, fresh);
  if (k % TILE_K<T>) run(a.from(steps), last, nullptr, 1, fresh && steps == 0);
}

// What of a panel over k is left behind whole tiles, as a tile.
template <class T>
INLINE void last_tile(const T* panel, i64 k, T* out) {
  const i64 whole = k / TILE_K<T> * TILE_K<T>;
  memset(out, 0, TILE_BYTES);
  memcpy(out, panel + whole * 16, (k - whole + Dot<T>::unit - 1) / Dot<T>::unit * 64);
}

// k elements of rows [row, row + height), as tiles filled up with zeros: [height / 16][k / per_line][16][per_line].
template <class T, class R>
INLINE void pack_rows(R row_of, i64 row, i64 height, i64 k0, i64 k, i64 per_line, T* out) {
  const i64 steps = (k + per_line - 1) / per_line;
  for (i64 r = 0; r < height; ++r) {
    const T* from = row_of(row + r) + k0;
    T* to = out + (r / TILE_HEIGHT * steps * TILE_HEIGHT + r % TILE_HEIGHT) * per_line;
    for (i64 at = 0; at < k; at += per_line, to += TILE_HEIGHT * per_line) {
      const i64 count = k - at < per_line ? k - at : per_line;
      memcpy(to, from + at, count * sizeof(T));
      memset(static_cast<void*>(to + count), 0, (per_line - count) * sizeof(T));
    }
  }
}

// The tiles that `pack_rows` made, from row tile `tile` on.
template <class T>
INLINE RowTiles packed_tiles(const T* packed, i64 tile, i64 k, i64 per_line) {
  const i64 size = (k + per_line - 1) / per_line * TILE_HEIGHT * per_line * i64(sizeof(T));
  const char* first = reinterpret_cast<const char*>(packed) + tile * size;
  return {first, first + size, per_line * i64(sizeof(T)), TILE_HEIGHT * per_line * i64(sizeof(T))};
}

// Up to 32 rows where they lie, if they are equally far apart and k is made of whole tiles; else packed.
template <class T, class R>
INLINE RowTiles row_tiles_of(R row_of, i64 row, i64 height, i64 k0, i64 k, i64 per_line, T* room) {
  const char* first = reinterpret_cast<const char*>(row_of(row) + k0);
  auto apart = [&](i64 r) { return reinterpret_cast<const char*>(row_of(row + r) + k0) - first; };
  const i64 stride = height > 1 ? apart(1) : 0;
  bool regular = k % per_line == 0;
  for (i64 r = 2; r < height && regular; ++r) regular = apart(r) == r * stride;
  if (regular) return {first, first + TILE_HEIGHT * stride, stride, per_line * i64(sizeof(T))};
  pack_rows(row_of, row, height, k0, k, per_line, room);
  return packed_tiles(room, 0, k, per_line);
}

// Not inlined: what it takes of the stack it then gives back.
template <class T, class W, class R, class E>
__attribute__((noinline)) void tile_panels(const Panels<W>& w, i64 begin, i64 end, i64 rows, R row_of, E emit) {
  constexpr bool widens = !std::is_same_v<T, W>;
  constexpr i64 group = 4, width = group * LANES, most = TILE_BLOCK / i64(sizeof(T)), height = 2 * TILE_HEIGHT;
  const i64 block = !widens ? most : rows <= TILE_HEIGHT ? TILE_WIDE_K : TILE_WIDE_K_MANY;
  alignas(64) float sums[BLOCK_ROWS * width];
  alignas(64) T room[height * most], last_tiles[group * TILE_HEIGHT * TILE_K<T>];
  alignas(64) T wide[widens ? group * TILE_WIDE_K_MANY * 16 : 1];
  for (i64 panel = begin; panel < end; panel += group) {
    const i64 count = end - panel < group ? end - panel : group;
    for (i64 k0 = 0; k0 < w.k; k0 += block) {
      const bool is_last = k0 + block >= w.k;
      const i64 k = is_last ? w.k - k0 : block;
      const T *panels[group], *last[group];
      for (i64 p = 0; p < count; ++p) {
        if constexpr (widens) {
          widen(w.panel(panel + p) + k0 * 16, k, wide + p * block * 16);
          panels[p] = wide + p * block * 16;
        } else {
          panels[p] = w.panel(panel + p) + k0 * 16;
        }
        last[p] = last_tiles + p * TILE_HEIGHT * TILE_K<T>;
        if (k % TILE_K<T>) last_tile(panels[p], k, last_tiles + p * TILE_HEIGHT * TILE_K<T>);
      }
      for (i64 row = 0; row < rows; row += height) {
        const i64 high = rows - row < height ? rows - row : height;
        const RowTiles a = row_tiles_of<T>(row_of, row, high, k0, k, TILE_K<T>, room);
        float* part = sums + (w.k > block ? row * width : 0);
        for (i64 p = 0; p < count; p += 2)
          tile_product<T>(high, a, count - p, panels + p, last + p, nullptr, k, part + p * LANES, width, k0 == 0);
        if (!is_last) continue;
        for (i64 m = 0; m < high; ++m)
          for (i64 p = 0; p < count; ++p) emit(row + m, panel + p, Dot<T>::sum(part + m * width + p * LANES));
      }
    }
  }
}

}  // namespace inferc
