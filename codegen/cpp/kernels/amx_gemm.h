// `gemm_panels` on tiles: 32 rows by two panels at a time, or 16 by four, with four tiles of sums.
// A panel is the product's right side as stored, rows are its left side. Whatever the number of rows, an output adds up
// tiles of k in ascending order, the last one padded with zeros: a row's bits do not depend on the other rows.
#pragma once
#include "gemm.h"

namespace inferc {

template <class T>
constexpr i64 TILE_K = TILE_LINE / i64(sizeof(T));
// The most bytes of a row in a block of k where weights are widened: two panels are then 32 KB.
constexpr i64 TILE_WIDE_BYTES = 1024;

// One or two tiles of rows: those of k step i start `step` bytes after those of step i - 1, rows are `stride` bytes
// apart.
struct RowTiles {
  const char *first, *second;
  i64 stride, step;
  INLINE RowTiles from(i64 i) const { return {first + i * step, second + i * step, stride, step}; }
};

// The prefetches beside a product: `bytes` from each of both addresses with every step of it.
struct TileAhead {
  const char *first = nullptr, *second = nullptr;
  i64 bytes = 0;
};
// The bytes of each prefetch, in whole lines, so that `all` bytes are there after so many steps.
INLINE i64 fetched_each(i64 all, i64 steps) { return (all + steps * TILE_LINE - 1) / (steps * TILE_LINE) * TILE_LINE; }

// Which operand leaves the first-level cache before it is read again, while the other one stays.
enum Streams { NEITHER, ROWS, PANELS };

// Multiplies M tiles of rows by P panels over whole tiles of k: to[row * stride + p * 16 + lane], started at zero, or
// with the sums at `from`.
template <class T, int M, int P, Streams STREAMS>
__attribute__((noinline)) void multiply_tiles(const RowTiles& a, const T* const* b, const TileAhead& ahead, i64 steps,
                                              const float* from, float* to, i64 stride) {
  const char *first = ahead.first, *second = ahead.second;
  const i64 fetched = ahead.bytes;
  constexpr T* type = nullptr;
  const char *rows = a.first, *more = a.second, *panels[P];
  const i64 row_stride = a.stride, row_step = a.step, line = stride * i64(sizeof(float));
  for (int p = 0; p < P; ++p) panels[p] = reinterpret_cast<const char*>(b[p]);
  auto on_sums = [&](auto f) {
    f.template operator()<0, 0>();
    if constexpr (M == 2) f.template operator()<1, 0>();
    if constexpr (P == 2) f.template operator()<0, 1>();
    if constexpr (M == 2 && P == 2) f.template operator()<1, 1>();
  };
  on_sums([&]<int m, int p>() {
    if (!from) amx::zero<2 * m + p>();
    else amx::load<2 * m + p>(from + m * TILE_HEIGHT * stride + p * LANES, line);
  });
  auto load = [&]<int R>(std::integral_constant<int, R>, const char* at, i64 apart) {
    if constexpr (STREAMS == (R < 6 ? ROWS : PANELS)) amx::stream<R>(at, apart);
    else amx::load<R>(at, apart);
  };
  for (i64 i = 0; i < steps; ++i) {
    for (const char* end = first + fetched; first < end; first += TILE_LINE, second += TILE_LINE) {
      fetch_l2(first);
      fetch_l2(second);
    }
    load(std::integral_constant<int, 4>(), rows, row_stride);
    if constexpr (M == 2) load(std::integral_constant<int, 5>(), more, row_stride);
    load(std::integral_constant<int, 6>(), panels[0], TILE_LINE);
    if constexpr (P == 2) load(std::integral_constant<int, 7>(), panels[1], TILE_LINE);
    amx::dot<0, 4, 6>(type);
    if constexpr (M == 2) amx::dot<2, 5, 6>(type);
    if constexpr (P == 2) amx::dot<1, 4, 7>(type);
    if constexpr (M == 2 && P == 2) amx::dot<3, 5, 7>(type);
    rows += row_step, more += row_step;
    for (int p = 0; p < P; ++p) panels[p] += TILE_BYTES;
  }
  on_sums([&]<int m, int p>() { amx::store<2 * m + p>(to + m * TILE_HEIGHT * stride + p * LANES, line); });
}

// Multiplies up to 32 rows by one or two panels over any k as above. For a last step that is no whole tile, `a` is
// padded with zeros, and last[p] has the rest of the panel.
template <class T, Streams STREAMS>
INLINE void tile_product(i64 height, const RowTiles& a, i64 count, const T* const* b, const T* const* last,
                         const TileAhead& ahead, i64 k, const float* from, float* to, i64 stride) {
  auto run = [&](const RowTiles& rows, const T* const* panels, const TileAhead& next, i64 steps, const float* start) {
    if (height > TILE_HEIGHT) {
      if (count > 1) multiply_tiles<T, 2, 2, STREAMS>(rows, panels, next, steps, start, to, stride);
      else multiply_tiles<T, 2, 1, STREAMS>(rows, panels, next, steps, start, to, stride);
    } else {
      if (count > 1) multiply_tiles<T, 1, 2, STREAMS>(rows, panels, next, steps, start, to, stride);
      else multiply_tiles<T, 1, 1, STREAMS>(rows, panels, next, steps, start, to, stride);
    }
  };
  const i64 steps = k / TILE_K<T>;
  shape_tiles(height < TILE_HEIGHT ? height : TILE_HEIGHT, height > TILE_HEIGHT ? height - TILE_HEIGHT : 0);
  if (steps) run(a, b, ahead, steps, from);
  if (k % TILE_K<T>) run(a.from(steps), last, {}, 1, steps ? to : from);
}

// The rest of a panel over k after its whole tiles, as a tile.
template <class T>
INLINE void last_tile(const T* panel, i64 k, T* out) {
  const i64 whole = k / TILE_K<T> * TILE_K<T>;
  memset(out, 0, TILE_BYTES);
  memcpy(out, panel + whole * 16, (k - whole + Dot<T>::unit - 1) / Dot<T>::unit * 64);
}

// Packs k elements of rows [row, row + height) as tiles padded with zeros: [height / 16][k / per_line][16][per_line].
template <class T, class R>
INLINE void pack_rows(R row_of, i64 row, i64 height, i64 k0, i64 k, i64 per_line, T* out) {
  const i64 steps = (k + per_line - 1) / per_line;
  for (i64 r = 0; r < height; ++r) {
    const T* from = row_of(row + r) + k0;
    T* to = out + (r / TILE_HEIGHT * steps * TILE_HEIGHT + r % TILE_HEIGHT) * per_line;
    for (i64 at = 0; at < k; at += per_line, to += TILE_HEIGHT * per_line) {
      const i64 count = k - at < per_line ? k - at : per_line;
      if (count * i64(sizeof(T)) == TILE_LINE) {
        memcpy(to, from + at, TILE_LINE);
        continue;
      }
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

// Rows as tiles: where they are stored, or packed.
struct TiledRows {
  const char* data;
  i64 tile, stride, step;  // bytes from 16 rows to the next 16, from a row to the next, from a tile of k to the next
  INLINE RowTiles at(i64 row, i64 step_of_k) const {
    const char* first = data + row / TILE_HEIGHT * tile + step_of_k * step;
    return {first, first + tile, stride, step};
  }
};

// Whether rows have a constant stride.
template <class R>
INLINE bool is_regular(R row_of, i64 rows) {
  for (i64 row = 2; row < rows; ++row)
    if (bytes_between(row_of(0), row_of(row)) != row * bytes_between(row_of(0), row_of(1))) return false;
  return true;
}

// The bytes for packed rows: 0 if rows are tiles where they are stored, with a constant stride and a k of whole tiles.
template <class T, class R>
INLINE i64 packed_bytes(R row_of, i64 rows, i64 k) {
  if (k % TILE_K<T> == 0 && is_regular(row_of, rows)) return 0;
  return (rows + TILE_HEIGHT - 1) / TILE_HEIGHT * ((k + TILE_K<T> - 1) / TILE_K<T>) * TILE_BYTES;
}

// All rows over all k, packed in `room` of packed_bytes unless that is null.
template <class T, class R>
INLINE TiledRows tiled_rows(R row_of, i64 rows, i64 k, T* room) {
  if (room) {
    pack_rows(row_of, 0, rows, 0, k, TILE_K<T>, room);
    return {reinterpret_cast<const char*>(room), (k + TILE_K<T> - 1) / TILE_K<T> * TILE_BYTES, TILE_LINE, TILE_BYTES};
  }
  const i64 stride = rows > 1 ? bytes_between(row_of(0), row_of(1)) : 0;
  return {reinterpret_cast<const char*>(row_of(0)), TILE_HEIGHT * stride, stride, TILE_LINE};
}

// Up to 32 rows where they are stored, if they have a constant stride and a k of whole tiles; else packed.
template <class T, class R>
INLINE RowTiles row_tiles_of(R row_of, i64 row, i64 height, i64 k0, i64 k, i64 per_line, T* room) {
  auto from_k0 = [&](i64 r) { return row_of(row + r) + k0; };
  if (k % per_line == 0 && is_regular(from_k0, height)) {
    const char* first = reinterpret_cast<const char*>(from_k0(0));
    const i64 stride = height > 1 ? bytes_between(from_k0(0), from_k0(1)) : 0;
    return {first, first + TILE_HEIGHT * stride, stride, per_line * i64(sizeof(T))};
  }
  pack_rows(row_of, row, height, k0, k, per_line, room);
  return packed_tiles(room, 0, k, per_line);
}

// Hands the sums of up to 32 rows by P panels to `emit`. It takes `emit` by value: what that captured stays in
// registers, while memory would be loaded again after every store through it.
template <class T, int P, class E>
INLINE void emit_sums(const float* sums, i64 height, i64 row, i64 panel, E emit) {
  for (i64 m = 0; m < height; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) emit(row + m, panel + p, Dot<T>::sum(sums + (2 * m + p) * LANES));
}

// Multiplies four panels by up to 16 rows, while the weight streams from memory: sums [16][4][16]. It prefetches half a
// tile ahead, and where panels end, `next` bytes after each.
template <class T>
INLINE void stream_tiles(const Panels<T>& w, i64 panel, i64 rows, const RowTiles& a, i64 next, float* sums) {
  constexpr T* type = nullptr;
  constexpr i64 line = 4 * TILE_LINE;
  const i64 steps = w.k / TILE_K<T>, left = w.k % TILE_K<T>;
  const char *panels[4], *row = a.first;
  for (int p = 0; p < 4; ++p) panels[p] = reinterpret_cast<const char*>(w.panel(panel + p));
  auto step = [&](const char* rows_at, i64 stride, const char* first, const char* second, const char* third,
                  const char* fourth) {
    amx::load<4>(rows_at, stride);
    amx::load<6>(first, TILE_LINE), amx::dot<0, 4, 6>(type);
    amx::load<7>(second, TILE_LINE), amx::dot<1, 4, 7>(type);
    amx::load<6>(third, TILE_LINE), amx::dot<2, 4, 6>(type);
    amx::load<7>(fourth, TILE_LINE), amx::dot<3, 4, 7>(type);
  };
  shape_tiles(rows, rows);
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  for (i64 i = 0; i < steps; ++i, row += a.step) {
    step(row, a.stride, panels[0], panels[1], panels[2], panels[3]);
    const i64 after = i + 1 < steps ? TILE_BYTES : TILE_BYTES + next;
    for (i64 at = 0; at < TILE_BYTES / 2; at += TILE_LINE)
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) fetch_l2(panels[p] + TILE_BYTES / 2 + at), fetch_l2(panels[p] + after + at);
    for (int p = 0; p < 4; ++p) panels[p] += TILE_BYTES;
  }
  if (left) {
    alignas(64) T last[4][TILE_HEIGHT * TILE_K<T>];
    for (int p = 0; p < 4; ++p) last_tile(w.panel(panel + p), w.k, last[p]);
    auto at = [&](int p) { return reinterpret_cast<const char*>(last[p]); };
    step(row, a.stride, at(0), at(1), at(2), at(3));
  }
  amx::store<0>(sums, line), amx::store<1>(sums + LANES, line);
  amx::store<2>(sums + 2 * LANES, line), amx::store<3>(sums + 3 * LANES, line);
}

// Multiplies by weights in int8 as above. They are widened one tile of each panel at a time, while the previous tiles
// are multiplied: M tiles of rows by P panels, sums [16 * M][P][16].
template <class T, int M, int P>
INLINE void stream_widened(const Panels<i8>& w, i64 panel, i64 rows, const RowTiles& a, i64 next, float* sums) {
  constexpr T* type = nullptr;
  constexpr i64 line = P * TILE_LINE, lines = TILE_K<T> / 4, bytes = lines * 64, tile = TILE_HEIGHT * TILE_K<T>;
  const i64 steps = (w.k + TILE_K<T> - 1) / TILE_K<T>, all = w.size();
  alignas(64) T room[2][P][tile];
  const i8* panels[P];
  for (int p = 0; p < P; ++p) panels[p] = w.panel(panel + p);
  auto make = [&](i64 step) __attribute__((always_inline)) {
    const i64 at = step * bytes, there = all - at < bytes ? (all - at) / 64 : lines;
    const i64 ahead = at + FETCH_BYTES / P < all ? at + FETCH_BYTES / P : at + FETCH_BYTES / P + next;
    T* to = room[step & 1][0];
    if (there < lines) memset(static_cast<void*>(to), 0, sizeof(room[0]));
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
      for (i64 i = 0; i < there; ++i) {
        fetch_l2(panels[p] + ahead + i * 64);
        widen_line(panels[p] + at + i * 64, to + p * tile + i * 64);
      }
    return to;
  };
  shape_tiles(M == 1 ? rows : TILE_HEIGHT, M == 1 ? rows : rows - TILE_HEIGHT);
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  const char *row = a.first, *more = a.second;
  const T* now = make(0);
  for (i64 i = 0; i < steps; ++i, row += a.step, more += a.step) {
    amx::load<4>(row, a.stride);
    if constexpr (M == 2) amx::load<5>(more, a.stride);
    const T* after = i + 1 < steps ? make(i + 1) : nullptr;
    amx::load<6>(now, TILE_LINE), amx::load<7>(now + tile, TILE_LINE);
    amx::dot<0, 4, 6>(type), amx::dot<1, 4, 7>(type);
    if constexpr (M == 2) {
      amx::dot<2, 5, 6>(type), amx::dot<3, 5, 7>(type);
    } else {
      amx::load<6>(now + 2 * tile, TILE_LINE), amx::load<7>(now + 3 * tile, TILE_LINE);
      amx::dot<2, 4, 6>(type), amx::dot<3, 4, 7>(type);
    }
    now = after;
  }
  amx::store<0>(sums, line), amx::store<1>(sums + LANES, line);
  float* second = M == 1 ? sums + 2 * LANES : sums + TILE_HEIGHT * 2 * LANES;
  amx::store<2>(second, line), amx::store<3>(second + LANES, line);
}

// Multiplies two panels at a time, a block of their k at a time, by all rows: a block of the panels stays in the
// first-level cache, the rows in the second. If rows over all k are too large for that, a block of k passes all panels
// before the next block. Not inlined: so its stack is released when it returns.
template <class T, class W, class R, class E>
__attribute__((noinline)) void tile_panels(const Panels<W>& w, i64 begin, i64 end, i64 after, i64 rows, R row_of,
                                           E emit, Beside beside) {
  constexpr bool widens = !std::is_same_v<T, W>;
  constexpr i64 width = 2 * LANES, wide_k = TILE_WIDE_BYTES / i64(sizeof(T)), tile = TILE_HEIGHT * TILE_K<T>;
  const i64 k = w.k, steps = (k + TILE_K<T> - 1) / TILE_K<T>, chosen = w.blocking->k_bytes / i64(sizeof(T));
  // A weight that is read only once streams through in whole panels.
  const i64 block = widens ? wide_k : rows > TILE_PAIR ? chosen : steps * TILE_K<T>;
  T* packed = nullptr;
  if (const i64 bytes = packed_bytes<T>(row_of, rows, k))
    packed = static_cast<T*>(__builtin_alloca_with_align(size_t(bytes), 8 * TILE_LINE));
  const TiledRows x = tiled_rows(row_of, rows, k, packed);
  const i64 panel_bytes = w.size() * i64(sizeof(W));
  alignas(64) float done[TILE_PAIR * width];
  auto stream = [&]<int M, int P>() {  // as many panels as are full
    for (; begin + P <= end; begin += P) {
      const i64 next = begin + 2 * P <= end ? begin + P : after < 0 ? begin : after;
      const i64 behind = bytes_between(w.panel(begin), w.panel(next)) - panel_bytes;
      if constexpr (widens) stream_widened<T, M, P>(w, begin, rows, x.at(0, 0), behind, done);
      else stream_tiles(w, begin, rows, x.at(0, 0), behind, done);
      for (i64 m = 0; m < rows; ++m)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) emit(m, begin + p, Dot<T>::sum(done + (P * m + p) * LANES));
    }
  };
  if (rows <= TILE_HEIGHT) stream.template operator()<1, 4>();
  if constexpr (widens)
    if (rows > TILE_HEIGHT && rows <= TILE_PAIR) stream.template operator()<2, 2>();
  const i64 all_pairs = (end - begin + 1) / 2;
  const i64 pairs = rows > TILE_PAIR ? w.blocking->pairs : 1;  // at a time
  const i64 of_pair = rows * width;
  const size_t room = size_t((pairs < all_pairs ? pairs : all_pairs) * of_pair) * sizeof(float);
  float* sums = static_cast<float*>(__builtin_alloca_with_align(room, 8 * TILE_LINE));
  alignas(64) T last_tiles[2 * tile], wide[widens ? 2 * wide_k * 16 : 1];
  const i64 products = (rows + TILE_PAIR - 1) / TILE_PAIR;
  auto bytes_of = [&](i64 panel) { return reinterpret_cast<const char*>(w.panel(panel)); };
  auto multiply_pair = [&](i64 panel, i64 k0, float* pair_sums, TileAhead ahead) {
    const i64 count = end - panel < 2 ? 1 : 2, here = k - k0 < block ? k - k0 : block;
    const bool is_last = k0 + block >= k;
    const T *panels[2], *last[2] = {last_tiles, last_tiles + tile};
    for (i64 p = 0; p < count; ++p) {
      if constexpr (widens) {
        widen(w.panel(panel + p) + k0 * 16, here, wide + p * wide_k * 16);
        panels[p] = wide + p * wide_k * 16;
      } else {
        panels[p] = w.panel(panel + p) + k0 * 16;
      }
      if (here % TILE_K<T>) last_tile(panels[p], here, last_tiles + p * tile);
    }
    for (i64 row = 0; row < rows; row += TILE_PAIR) {
      const i64 high = rows - row < TILE_PAIR ? rows - row : TILE_PAIR;
      const RowTiles a = x.at(row, k0 / TILE_K<T>);
      float *part = pair_sums + row * width, *to = is_last ? done : part;
      const float* from = k0 ? part : nullptr;
      if (is_last && beside.data)
        for (i64 m = 0; m < high; ++m) beside.fetch(row + m, panel * 16);
      if (rows > TILE_PAIR) tile_product<T, ROWS>(high, a, count, panels, last, ahead, here, from, to, width);
      else tile_product<T, NEITHER>(high, a, count, panels, last, ahead, here, from, to, width);
      const i64 passed = here / TILE_K<T> * ahead.bytes;
      ahead.first += passed, ahead.second += passed;
      if (!is_last) continue;
      if (count == 2) emit_sums<T, 2>(done, high, row, panel, emit);
      else emit_sums<T, 1>(done, high, row, panel, emit);
    }
  };
  for (i64 first = begin; first < end; first += 2 * pairs) {
    const i64 stop = first + 2 * pairs < end ? first + 2 * pairs : end;
    for (i64 k0 = 0; k0 < k; k0 += block)
      for (i64 panel = first; panel < stop; panel += 2) {
        const bool is_last = k0 + block >= k;
        // The next data to read: the same block of the next pair, the next block of the first pair, or a lone pair's
        // next block.
        const i64 at = bytes_between(w.panel(0), w.panel(0) + k0 * 16),
                  size = bytes_between(w.panel(0), w.panel(0) + block * 16);
        TileAhead ahead;
        if (rows <= TILE_PAIR) {
          if constexpr (!widens) ahead = {bytes_of(panel) + TILE_BYTES, bytes_of(panel + 1) + TILE_BYTES, TILE_BYTES};
        } else if (pairs > 1) {
          const bool turns = panel + 2 >= stop;
          const i64 next = !turns ? panel + 2 : is_last ? stop : first, from = !turns ? at : is_last ? 0 : at + size;
          if (next < end)
            ahead = {bytes_of(next) + from, bytes_of(next + 1) + from,
                     fetched_each(size, products * (block / TILE_K<T>))};
        } else if (panel + 2 < end) {
          const i64 each = fetched_each(panel_bytes, products * steps), passed = each * products * (k0 / TILE_K<T>);
          ahead = {bytes_of(panel + 2) + passed, bytes_of(panel + 3) + passed, each};
        }
        multiply_pair(panel, k0, sums + (panel - first) / 2 * of_pair, ahead);
      }
  }
}

}  // namespace inferc
