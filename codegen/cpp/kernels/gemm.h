// out = x @ weight.T (+ bias) with the weight in panels of 16 output rows, [n / 16][k / unit][16][unit].
// One accumulator per output, k ascending: a row's bits do not depend on how many rows there are.
#pragma once
#include <type_traits>

#include "dot.h"
#include "team.h"

namespace inferc {

#ifdef __AVX512F__
constexpr int TILE_ROWS = 6, TILE_PANELS = 4;  // 24 accumulators of 32 registers
constexpr int TALL_ROWS = 12;                  // with 2 panels: a small batch reads the weight once, from memory
constexpr i64 INT8_TILE_ROWS = 24;             // up to so many rows, weights in int8 are widened in registers
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int TILE_ROWS = 6, TILE_PANELS = 1;  // 24 of 32 registers
constexpr int TALL_ROWS = 0;
constexpr i64 INT8_TILE_ROWS = 2;
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 4, TILE_PANELS = 1;  // 16 of 32; a panel's bfloat16 take 8 when they are taken apart
constexpr int TALL_ROWS = 0;
constexpr i64 INT8_TILE_ROWS = 2;
#else
constexpr int TILE_ROWS = 4, TILE_PANELS = 1;  // 8 of 16
constexpr int TALL_ROWS = 0;
constexpr i64 INT8_TILE_ROWS = 2;
#endif
constexpr i64 PREFETCH_BYTES = 2048;
// The bytes of a weight, over all panels that are read at a time, that are prefetched ahead of a product of few rows.
// This is as much as arrives within a memory latency; a line that is prefetched too early delays the lines that are
// needed first.
constexpr i64 FETCH_BYTES = 3072;
constexpr i64 TILE_PAIR = 32;  // rows that tiles multiply at a time
constexpr i64 VECTOR_ROWS = 4;  // up to so many rows, tiles are no faster than vectors for int8 by int8
constexpr i64 WIDE_K = 256;    // k of int8 panels that is widened into L1 at a time, for rows of another type

// The cache blocking of a product: codegen/cpp/blocking.py chooses it for every product, for several numbers of rows.
struct Blocking {
  i64 up_to;    // the most rows that it was chosen for
  i64 rows;     // rows that pass a piece's panels before the next rows: at most BLOCK_ROWS, on tiles TILE_BLOCK_ROWS
  i64 k_bytes;  // bytes of k in a block, for integers that are not widened
  i64 pairs;    // pairs of panels that one block of k passes before the next block, while sums wait; 1 except on tiles
};
constexpr i64 BLOCK_ROWS = 192, TILE_BLOCK_ROWS = 512;
constexpr i64 ANY_ROWS = 0x7fffffff;
// The blocking of a product that none was chosen for, such as an expert's, whose pieces are two pairs of panels.
inline constexpr Blocking ANY_BLOCKING{ANY_ROWS, BLOCK_ROWS, AMX ? 1024 : 8192, AMX ? 2 : 1};

// The prefetches of a product into the second-level cache, unless `next` is null: lines that are `front` lines ahead of
// the ones it multiplies, and where a panel ends before that, lines from the start of next[p].
template <class T>
struct Fetch {
  const T* const* next = nullptr;
  i64 front = 0x7fffffff;  // more lines than any panel has
};

// Multiplies M rows by P panels over k elements: sums[m * stride + p * 16 + lane], started at zero if `fresh`, else
// continued. a and b point at the first elements. offsets [M], if Dot<T> has offsets.
// Not inlined: all matrix products of a program share the few sizes.
template <class T, int M, int P>
__attribute__((noinline)) void tile(const T* const* a, const T* const* b, Fetch<T> fetch, i64 k, float* sums,
                                    i64 stride, bool fresh, const i32* offsets) {
  using D = Dot<T>;
  constexpr i64 line = 16 * D::unit;
  const T *rows[M], *panels[P];
  typename D::Sum acc[M][P];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) panels[p] = b[p];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    rows[m] = a[m];
    const i32 offset = D::HAS_OFFSET && fresh ? offsets[m] : 0;
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) acc[m][p] = D::start(offset, sums + m * stride + p * LANES, fresh);
  }
  const i64 steps = k / D::unit, own = !fetch.next ? steps : steps > fetch.front ? steps - fetch.front : 0;
  const T* fetched[P];  // the panels to prefetch from: first those of this product, then the next ones
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) fetched[p] = panels[p] + (steps - own) * line;
  for (i64 i = 0, stop = own; i < steps; stop = steps) {
    for (; i < stop; ++i) {
      typename D::B right[P];
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        right[p] = D::right(panels[p] + i * line);
        if (fetch.next) fetch_l2(fetched[p] + i * line);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        typename D::A left = D::left(rows[m] + i * D::unit);
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) acc[m][p] = D::step(acc[m][p], left, right[p]);
      }
    }
    if (fetch.next)
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) fetched[p] = fetch.next[p] - own * line;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    if (steps * D::unit < k) {
      typename D::A left = D::left_tail(rows[m] + steps * D::unit, k - steps * D::unit);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) acc[m][p] = D::step(acc[m][p], left, D::right(panels[p] + steps * line));
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) store(sums + m * stride + p * LANES, acc[m][p]);
  }
}

// Multiplies any number of rows up to TILE_ROWS as `tile`, or up to TALL_ROWS with two panels.
template <class T, int P>
INLINE void multiply(i64 rows, const T* const* a, const T* const* b, Fetch<T> fetch, i64 k, float* sums, i64 stride,
                     bool fresh, const i32* offsets = nullptr) {
#define ROWS(M) \
  case M: return tile<T, M, P>(a, b, fetch, k, sums, stride, fresh, offsets);
  if constexpr (P == 2) {
    switch (rows) { ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) }
  } else if constexpr (TILE_ROWS == 6) {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
  } else {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) }
  }
#undef ROWS
}

// Splits `rows` into tiles of nearly equal height, at most `most`, and calls f(first, height).
template <class F>
INLINE void row_tiles(i64 rows, i64 most, F f) {
  i64 tiles = (rows + most - 1) / most;
  for (i64 i = 0; i < tiles; ++i) f(rows * i / tiles, rows * (i + 1) / tiles - rows * i / tiles);
}

INLINE i64 bytes_between(const void* a, const void* b) {
  return static_cast<const char*>(b) - static_cast<const char*>(a);
}

// A [rows, width] value: row i starts at data + i * stride.
template <class T>
struct Rows {
  T* data;
  i64 stride;
  INLINE T* operator[](i64 row) const { return data + row * stride; }
  INLINE operator Rows<const T>() const { return {data, stride}; }
};

// A view of packed weights: n output rows over k. With `gates`, the number of a gate's panels in front of as many
// panels of the gated projection, the two alternate: panel 2 * i is the gate's i-th.
template <class T>
struct Panels {
  const T* data;
  i64 n, k, gates = 0;
  const Blocking* blocking = &ANY_BLOCKING;
  // Returns this view with the first blocking that was chosen for at least so many rows.
  INLINE Panels for_rows(i64 rows) const {
    Panels chosen = *this;
    while (chosen.blocking->up_to < rows) ++chosen.blocking;
    return chosen;
  }
  INLINE i64 size() const { return 16 * ((k + Dot<T>::unit - 1) / Dot<T>::unit * Dot<T>::unit); }  // of a panel
  INLINE const T* panel(i64 p) const { return data + (gates ? p / 2 + p % 2 * gates : p) * size(); }
  INLINE i64 count() const { return (n + 15) / 16; }
};

// Widens k elements of one int8 panel to the layout of T's panels.
template <class T>
INLINE void widen(const i8* panel, i64 k, T* out) {
  for (i64 i = 0; i < (k + 3) / 4; ++i) {
    fetch_l1(panel + i * 64 + PREFETCH_BYTES);
    widen_line(panel + i * 64, out + i * 64);
  }
}

// Computes `tile` over all of k with weights in int8, for so few rows that widening in registers costs less than
// storing. Step by step it adds the same as `tile` of the widened weights, from zero if `fresh`. It prefetches `ahead`
// meanwhile.
template <class T, int M, int P>
__attribute__((noinline)) void int8_tile(const T* const* a, const i8* const* b, const i8* const* ahead, i64 k,
                                         float* sums, i64 stride, bool fresh) {
  using D = Dot<T>;
  constexpr int unit = D::unit;
  Vec acc[M][P];
#pragma GCC unroll 16
  for (int i = 0; i < M * P; ++i) acc[i / P][i % P] = fresh ? zero() : load(sums + i / P * stride + i % P * LANES);
  auto line = [&](i64 i, i64 left) {  // the last line has only `left` of its four k
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      IVec bytes = iload(b[p] + i * 64);
      fetch_l2(ahead[p] + i * 64);
      auto step = [&]<int S>(std::integral_constant<int, S>) {
        if (S * unit >= left) return;
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const T* x = a[m] + i * 4 + S * unit;
          acc[m][p] =
              D::template int8_step<S>(acc[m][p], (S + 1) * unit <= left ? D::left(x) : D::left_tail(x, 1), bytes);
        }
      };
      step(std::integral_constant<int, 0>());
      step(std::integral_constant<int, 1>());
      if constexpr (unit == 1) {
        step(std::integral_constant<int, 2>());
        step(std::integral_constant<int, 3>());
      }
    }
  };
  for (i64 i = 0; i < k / 4; ++i) line(i, 4);
  if (k % 4) line(k / 4, k % 4);
#pragma GCC unroll 16
  for (int i = 0; i < M * P; ++i) store(sums + i / P * stride + i % P * LANES, acc[i / P][i % P]);
}

// Multiplies rows [0, rows) by P panels from `panel` on; emit(row, panel, sums) gets each finished vector of 16
// outputs. row_of(i) is the address of row i. A long k goes in blocks, continued in float32 or int32, which rounds
// nothing. Weights in int8 are read as such and widened in registers or a block at a time: the additions are those of
// weights in T. offsets [rows] as for `tile`. If `fetches`, it prefetches what it multiplies next: its own panels, and
// at their end the P panels from `next` on, unless that is negative; with so many rows that each line takes a while, it
// only prefetches those.
template <class T, int P, class W, class R, class E>
INLINE void gemm_block(const Panels<W>& w, i64 panel, i64 rows, const i32* offsets, R row_of, E emit,
                       bool fetches = false, i64 next = -1) {
  constexpr bool widens = !std::is_same_v<T, W>;
  constexpr i64 width = P * LANES;
  const i64 block = widens ? WIDE_K : w.blocking->k_bytes / i64(sizeof(T));
  alignas(64) float sums[BLOCK_ROWS * width];
  alignas(64) T wide[widens ? P * WIDE_K * 16 : 1];
  for (i64 k0 = 0; k0 < w.k; k0 += block) {
    bool is_last = k0 + block >= w.k;
    const T *panels[P], *ahead[P], *a[P == 2 ? 12 : TILE_ROWS];
    const bool is_near = rows <= TILE_ROWS;
    for (int p = 0; p < P; ++p) {
      if constexpr (!widens) {
        const i64 at = is_near ? is_last ? 0 : k0 + block : k0;
        ahead[p] = w.panel((next < 0 || (is_near && !is_last) ? panel : next) + p) + at * 16;
      }
      if constexpr (widens) {
        widen(w.panel(panel + p) + k0 * 16, is_last ? w.k - k0 : block, wide + p * WIDE_K * 16);
        panels[p] = wide + p * WIDE_K * 16;
      } else {
        panels[p] = w.panel(panel + p) + k0 * 16;
      }
    }
    row_tiles(rows, P == 2 ? TALL_ROWS : TILE_ROWS, [&](i64 row, i64 height) {
      for (i64 m = 0; m < height; ++m) a[m] = row_of(row + m) + k0;
      float* part = sums + (w.k > block ? row * width : 0);
      const Fetch<T> fetch{fetches && (is_near || next >= 0) ? ahead : nullptr,
                           is_near ? FETCH_BYTES / 64 / P : 0x7fffffff};
      multiply<T, P>(height, a, panels, fetch, is_last ? w.k - k0 : block, part, width, k0 == 0, offsets + row);
      if (!is_last) return;
      for (i64 m = 0; m < height; ++m)
        for (int p = 0; p < P; ++p) emit(row + m, panel + p, Dot<T>::sum(part + m * width + p * LANES));
    });
  }
}

// Computes `int8_tile` of any number of rows up to M.
template <class T, int M, int P>
INLINE void int8_multiply(i64 rows, const T* const* a, const i8* const* b, const i8* const* ahead, i64 k, float* sums,
                          i64 stride, bool fresh) {
  auto run = [&]<int H>(std::integral_constant<int, H>) {
    if constexpr (H <= M)
      if (rows == H) int8_tile<T, H, P>(a, b, ahead, k, sums, stride, fresh);
  };
#define ROWS(H) run(std::integral_constant<int, H>());
  ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
}

// Computes `gemm_block` by `int8_tile`, with at most M rows at a time.
template <class T, int M, int P, class R, class E>
INLINE void int8_block(const Panels<i8>& w, i64 panel, i64 rows, R row_of, E emit) {
  constexpr i64 width = P * LANES;
  alignas(64) float sums[M * width];
  const i8 *panels[P], *ahead[P];
  for (int p = 0; p < P; ++p) panels[p] = w.panel(panel + p), ahead[p] = panels[p] + FETCH_BYTES / P;
  row_tiles(rows, M, [&](i64 row, i64 height) {
    const T* a[M];
    for (i64 m = 0; m < height; ++m) a[m] = row_of(row + m);
    int8_multiply<T, M, P>(height, a, panels, ahead, w.k, sums, width, true);
    for (i64 m = 0; m < height; ++m)
      for (int p = 0; p < P; ++p) emit(row + m, panel + p, load(sums + m * width + p * LANES));
  });
}

// Whether a product reads its weight once, and therefore prefetches it by instructions: the hardware prefetcher alone
// needs the first lines of every page to detect a stream. Weights that are widened are prefetched in other ways.
template <class T, class W>
INLINE bool fetches_weights(i64 rows) {
  if (!std::is_same_v<T, W>) return false;
  return rows <= (AMX ? TILE_HEIGHT : TALL_ROWS > 0 ? TALL_ROWS : TILE_ROWS);
}

// Multiplies the panels [begin, end) in groups of TILE_PANELS, or of two where that saves a second pass over the
// weight. after: the panel that the thread multiplies next, or -1.
template <class T, class W, class R, class E>
INLINE void vector_panels(const Panels<W>& w, i64 begin, i64 end, i64 after, i64 rows, R row_of, E emit) {
  i64 panel = begin;
  if constexpr (!std::is_same_v<T, W>) {
    if (rows <= INT8_TILE_ROWS) {
      if (rows <= 2)
        for (; panel + TILE_PANELS <= end; panel += TILE_PANELS)
          int8_block<T, 2, TILE_PANELS>(w, panel, rows, row_of, emit);
      if constexpr (TALL_ROWS > 0) {
        if (rows <= 6)
          for (; panel + 2 <= end; panel += 2) int8_block<T, 6, 2>(w, panel, rows, row_of, emit);
        for (; panel < end; ++panel) int8_block<T, 12, 1>(w, panel, rows, row_of, emit);
      }
      return;
    }
  }
  i32 offsets[BLOCK_ROWS];
  if constexpr (Dot<T>::HAS_OFFSET)
    for (i64 row = 0; row < rows; ++row) offsets[row] = Dot<T>::offset(row_of(row), w.k);
  if constexpr (TALL_ROWS > 0)
    if (rows > TILE_ROWS && rows <= TALL_ROWS)
      for (; panel + 2 <= end; panel += 2)
        gemm_block<T, 2>(w, panel, rows, offsets, row_of, emit, true, panel + 4 <= end ? panel + 2 : after);
  for (; panel + TILE_PANELS <= end; panel += TILE_PANELS) {
    const i64 next = panel + 2 * TILE_PANELS <= end ? panel + TILE_PANELS : after;
    gemm_block<T, TILE_PANELS>(w, panel, rows, offsets, row_of, emit, std::is_same_v<T, W> && rows <= TILE_ROWS, next);
  }
  if constexpr (TILE_PANELS > 1)
    for (; panel < end; ++panel) gemm_block<T, 1>(w, panel, rows, offsets, row_of, emit);
}

// Other data that `emit` will read, an element for each output, in rows with a constant stride; or nothing.
struct Beside {
  const char* data = nullptr;
  i64 stride = 0, size = 0;  // bytes between rows, and bytes of an element
  INLINE Beside from(i64 row) const { return {data + row * stride, stride, size}; }
  INLINE void fetch(i64 row, i64 column) const {
    if (data) fetch_l2(data + row * stride + column * size);
  }
};

template <class T, class W, class R, class E>
void tile_panels(const Panels<W>& w, i64 begin, i64 end, i64 after, i64 rows, R row_of, E emit,
                 Beside beside);  // amx_gemm.h

// Multiplies the panels [begin, end). Tiles round sums of bf16 differently from vectors, so with tiles all rows of bf16
// use them. Sums of integers are equal either way, and vectors multiply few rows as fast as memory delivers their
// weights.
template <class T, class W, class R, class E>
INLINE void gemm_panels(const Panels<W>& w, i64 begin, i64 end, i64 after, i64 rows, R row_of, E emit,
                        Beside beside = {}) {
  if constexpr (AMX && std::is_same_v<T, bf16>) {
    tile_panels<T>(w, begin, end, after, rows, row_of, emit, beside);
  } else {
    if constexpr (AMX && std::is_same_v<T, i8>)
      if (rows > VECTOR_ROWS) return tile_panels<T>(w, begin, end, after, rows, row_of, emit, beside);
    vector_panels<T>(w, begin, end, after, rows, row_of, emit);
  }
}

// The number of items to hand out at a time.
INLINE i64 piece_grain(const Team& team, i64 items) { return items < team.count * 16 ? 1 : items / (team.count * 8); }

// A product is handed out by this number of panels or a multiple of it: four, or two if some threads would get none.
// The panels of a gate and of the gated projection alternate, and go to one thread.
INLINE i64 panel_group(const Team& team, i64 panels) { return panels > 2 * team.count ? 4 : 2; }

// Where a thread starts to read a weight for few rows. The weight is handed out by `at_once` panels or a multiple of
// it: by a `panel_group` if that is 0, and in `project_heads` by the panels of a head.
template <class P>
INLINE Ahead first_piece(const Team& team, const P& w, i64 at_once = 0) {
  if (at_once == 0) at_once = panel_group(team, w.count());
  const i64 panels = piece_grain(team, (w.count() + at_once - 1) / at_once) * at_once;
  return {w.panel(team.tid * panels), bytes_between(w.panel(0), w.panel(panels))};
}

// Blocks of rows of nearly equal height: at most `most` rows, and multiples of `unit` except for the last block.
struct RowBlocks {
  i64 rows, most, unit = 1;
  INLINE i64 count() const { return (rows + most - 1) / most; }
  INLINE i64 begin(i64 block) const {
    const i64 row = (rows + unit - 1) / unit * block / count() * unit;
    return row < rows ? row : rows;
  }
};

// The blocks of rows in which rows of T go through a product.
template <class T>
INLINE RowBlocks row_blocks_of(i64 rows, const Blocking& blocking) {
  return {rows, blocking.rows, AMX && sizeof(T) < 4 && rows > TALL_ROWS ? TILE_PAIR : TILE_ROWS};
}

// Hands out a product of `rows` by `panels`, a `panel_group` or a multiple of it at a time: f(first row, end, first
// panel, end, the panel that the thread multiplies next or -1). early: to know that panel. most: groups at a time, if
// not 0.
template <class F>
INLINE void pieces(Team& team, const RowBlocks& rows, i64 panels, bool early, i64 most, F f) {
  const i64 size = panel_group(team, panels), groups = (panels + size - 1) / size, items = groups * rows.count();
  team.each_early(items, most ? most : piece_grain(team, items), early, [&](i64 begin, i64 end, i64 after) {
    // Items in the order (row block, panel group): neighbours share rows of x and stream the weight.
    while (begin < end) {
      i64 block = begin / groups, group = begin % groups;
      i64 stop = end - begin < groups - group ? group + end - begin : groups;
      f(rows.begin(block), rows.begin(block + 1), group * size, stop * size < panels ? stop * size : panels,
        early && after * size + TILE_PANELS <= panels ? after * size : -1);
      begin += stop - group;
    }
  });
}

// Multiplies x [rows, k]; emit(row, column, sums, width) gets each finished vector of `width` outputs, at most 16. It
// should capture by value: the compiler loads captured memory again for every vector, since the last store may have
// changed it.
template <class T, class W, class E>
INLINE void linear_to(Team& team, Rows<const T> x, i64 rows, const Panels<W>& panels, E emit, Beside beside = {}) {
  const bool early = fetches_weights<T, W>(rows);
  const Panels<W> w = panels.for_rows(rows);
  const RowBlocks blocks = row_blocks_of<T>(rows, *w.blocking);
  i64 groups = 0;
  if (w.blocking->pairs > 1) {
    // Rows over a long k are read from beyond the second-level cache, once for each piece: so there are as few pieces
    // as threads.
    const i64 most = w.blocking->pairs / 2, all = (w.count() + 3) / 4, share = (all + team.count - 1) / team.count;
    const i64 of_thread = (share + most - 1) / most;
    groups = (share + of_thread - 1) / of_thread;
  }
  pieces(team, blocks, w.count(), early, groups, [&](i64 row0, i64 row1, i64 first, i64 last, i64 after) {
    gemm_panels<T>(
        w, first, last, after, row1 - row0, [&](i64 row) { return x[row0 + row]; },
        [emit, row0, n = w.n](i64 row, i64 panel, auto sums) { emit(row0 + row, panel * 16, sums, n - panel * 16); },
        beside.from(row0));
  });
}

// Sums times the outputs' own scales and plus their biases, each of which may be null.
template <class T>
INLINE Vec finished(Vec sums, const float* scale, const T* bias, i64 at, i64 count) {
  if (scale) sums = mul(sums, load(scale + at, count));
  return bias ? add(sums, load(bias + at, count)) : sums;
}

// Writes a product, rounded, or its sum with the residual unless that is null.
template <class T>
struct Written {
  Rows<const T> residual;
  Rows<T> out;
  INLINE Beside beside() const {
    return {reinterpret_cast<const char*>(residual.data), residual.stride * i64(sizeof(T)), i64(sizeof(T))};
  }
  INLINE void operator()(i64 row, i64 column, Vec product, i64 width) const {
    if (residual.data) product = add(load(residual[row] + column, width), rounded<T>(product));
    store(out[row] + column, product, width);
  }
};

// out [rows, n] in O; bias [n] or null.
template <class T, class O>
KERNEL void linear(Team& team, Rows<const T> x, i64 rows, Panels<T> w, const T* bias, Rows<O> out) {
  const Written<O> written{{nullptr, 0}, out};
  linear_to(team, x, rows, w, [=](i64 row, i64 column, Vec acc, i64 width) {
    written(row, column, finished<T>(acc, nullptr, bias, column, width), width);
  });
}

// Computes out = residual + the product, which is rounded first. `out` may be the same memory as `residual`.
template <class T, class O>
KERNEL void linear_add(Team& team, Rows<const T> x, i64 rows, Panels<T> w, const T* bias, Rows<const O> residual,
                       Rows<O> out) {
  const Written<O> written{residual, out};
  auto emit = [=](i64 row, i64 column, Vec acc, i64 width) {
    written(row, column, finished<T>(acc, nullptr, bias, column, width), width);
  };
  linear_to(team, x, rows, w, emit, written.beside());
}

// Computes out [rows, w.n / 2] = silu(gate) * up, both rounded first, from alternating panels of a gate and of up.
template <class T>
KERNEL void linear_silu_mul(Team& team, Rows<const T> x, i64 rows, Panels<T> w, const T* bias, Rows<T> out) {
  auto emit = [=, half = w.n / 2](i64 row, i64 column, Vec acc, i64) {
    const i64 at = column / 32 * 16;
    const bool is_gate = column % 32 == 0;
    const Vec product = finished<T>(acc, nullptr, bias, is_gate ? at : half + at, LANES);
    T* to = out[row] + at;  // here the gate's product waits for up's
    store(to, is_gate ? product : mul(silu(load(to)), rounded<T>(product)));
  };
  linear_to(team, x, rows, w, emit);
}

// Multiplies by weights in int8 with a scale for each output, which multiplies the whole sum. The result is in O.
template <class T, class O>
KERNEL void linear_int8(Team& team, Rows<const T> x, i64 rows, Panels<i8> w, const float* scale, const T* bias,
                        Written<O> out) {
  auto emit = [=](i64 row, i64 column, Vec acc, i64 width) {
    out(row, column, finished(acc, scale, bias, column, width), width);
  };
  linear_to(team, x, rows, w, emit, out.beside());
}

// Turns sums into numbers, for rows that are not integers and for rows that are. The bias is in T.
template <class T>
struct FromSums {
  const float* scale;
  const T* bias;
  INLINE Vec operator()(Vec sums, i64, i64 at, i64 width = LANES) const {
    return finished(sums, scale, bias, at, width);
  }
};
template <class T>
struct FromIntegers {
  Rows<const float> x_scale;
  const float* scale;
  const T* bias;
  INLINE Vec operator()(IVec sums, i64 row, i64 at, i64 width = LANES) const {
    return finished(mul(to_float(sums), set1(*x_scale[row])), scale, bias, at, width);
  }
};

// Returns an `emit` that writes such numbers.
template <class T, class O>
INLINE auto written_from(FromIntegers<T> number, Written<O> out) {
  return [=](i64 row, i64 column, IVec acc, i64 width) { out(row, column, number(acc, row, column, width), width); };
}

// Multiplies rows in int8 too, x_scale [rows, 1]; the bias is in T.
template <class T, class O>
KERNEL void linear_w8a8(Team& team, Rows<const i8> x, Rows<const float> x_scale, i64 rows, Panels<i8> w,
                        const float* scale, const T* bias, Written<O> out) {
  linear_to(team, x, rows, w, written_from(FromIntegers<T>{x_scale, scale, bias}, out), out.beside());
}

// Multiplies each of `heads` consecutive pieces of k elements of a row by its own weight of w.n output rows.
template <class T>
KERNEL void head_linear(Team& team, Rows<const T> x, i64 rows, i64 heads, Panels<T> w, Rows<T> out) {
  const i64 groups = (w.count() + 3) / 4, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const i64 weight_size = w.count() * w.size();
  team.each(heads * groups * blocks, 1, [&](i64 item, i64) {
    i64 block = item / groups % blocks, head = item / groups / blocks, panel = item % groups * 4;
    i64 row0 = rows * block / blocks, row1 = rows * (block + 1) / blocks;
    Panels<T> own{w.data + head * weight_size, w.n, w.k};
    gemm_panels<T>(
        own, panel, panel + 4 < w.count() ? panel + 4 : w.count(), -1, row1 - row0,
        [&](i64 row) { return x[row0 + row] + head * w.k; },
        [&](i64 row, i64 p, Vec acc) { store(out[row0 + row] + head * w.n + p * 16, acc, w.n - p * 16); });
  });
}

}  // namespace inferc

#include "amx_gemm.h"
