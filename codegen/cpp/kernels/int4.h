// Rows in int8 times weights in four bits (W4A8), which have a scale for each output and group of k.
//
// A panel's bytes lie as those of an int8 weight of half the k, [k / 8][16][4]: of each eight k of an output the low bits
// hold the first four, the high bits the others. An integer is stored plus 8, so that it has no sign, as vpdpbusd and
// vpmaddubsw want their first factor; a group's sum then starts 8 times the row's own sum lower.
#pragma once
#include "gemm.h"

namespace inferc {

struct Int4Panels {
  const u8* data;
  const u16* scale;  // [n / 16][groups][16], half precision
  i64 n, k, group;   // a multiple of 32
  INLINE i64 groups() const { return (k + group - 1) / group; }
  INLINE i64 count() const { return (n + 15) / 16; }
  INLINE const u8* panel(i64 p) const { return data + p * groups() * group * 8; }
  INLINE const u16* scales(i64 p) const { return scale + p * groups() * 16; }
};

constexpr i64 FLUSH = 32;           // of k: as many products as 16 bits hold
constexpr i64 INT4_BLOCK_ROWS = 192;  // that share one pass over a group of panels
constexpr i64 INT4_BLOCK_K = 512;    // of k at a time that is put as bytes; a multiple of every group
constexpr i64 INT4_PREFETCH_BYTES = 6144;  // as one or two panels are read at a time

#ifdef __AVX512VNNI__
constexpr int INT4_ROWS = 6, INT4_TALL_ROWS = 12;

struct Int4 {
  using Line = __m512i;  // 16 outputs by four of k
  using Left = __m512i;
  using Sum = __m512i;
  using Part = __m512i;
  static INLINE Line low(const u8* p) { return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15)); }
  static INLINE Line high(const u8* p) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
  }
  static INLINE Line line(const u8* p) { return _mm512_loadu_si512(p); }
  static INLINE void store_line(u8* p, Line line) { _mm512_storeu_si512(p, line); }
  static INLINE Left left(i32 bytes) { return _mm512_set1_epi32(bytes); }
  static INLINE Sum start(i32 offset) { return _mm512_set1_epi32(offset); }
  static INLINE Part open(Sum sum) { return sum; }
  static INLINE Part step(Part part, Line w, Left a) { return _mm512_dpbusd_epi32(part, w, a); }
  static INLINE Sum close(Sum, Part part) { return part; }
  static INLINE Vec value(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
};
#elif defined(__aarch64__)
constexpr int INT4_ROWS = 4, INT4_TALL_ROWS = 0;

// sdot takes both factors with a sign, and four bits plus 8 are positive with one too.
struct Int4 {
  using Line = IVec;
  using Left = Dot<i8>::A;
  using Sum = IVec;
  using Part = IVec;
  static INLINE Line low(const u8* p) {
    auto bits = [](int32x4_t stored) { return vandq_s32(stored, vdupq_n_s32(0x0f0f0f0f)); };
    const Line line = iload(p);
    return INFERC_FOUR(bits, line);
  }
  static INLINE Line high(const u8* p) {
    auto bits = [](int32x4_t stored) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(stored), 4)); };
    const Line line = iload(p);
    return INFERC_FOUR(bits, line);
  }
  static INLINE Line line(const u8* p) { return iload(p); }
  static INLINE void store_line(u8* p, const Line& line) { store(static_cast<void*>(p), line); }
  static INLINE Left left(i32 bytes) { return vreinterpretq_s8_s32(vdupq_n_s32(bytes)); }
  static INLINE Sum start(i32 offset) { return iset1(offset); }
  static INLINE Part open(const Sum& sum) { return sum; }
  static INLINE Part step(const Part& part, const Line& w, Left a) { return Dot<i8>::step(part, a, w); }
  static INLINE Sum close(const Sum&, const Part& part) { return part; }
  static INLINE Vec value(const Sum& sum) { return to_float(sum); }
};
#else
constexpr int INT4_ROWS = 2, INT4_TALL_ROWS = 0;

struct Int4 {
  struct Pair {
    __m256i l, h;
  };
  using Line = Pair;
  using Left = __m256i;
  using Sum = Pair;   // in 32 bits
  using Part = Pair;  // in 16: eight products of at most 15 * 127 to a lane
  static INLINE Line low(const u8* p) {
    Line line = Int4::line(p);
    return {_mm256_and_si256(line.l, _mm256_set1_epi8(15)), _mm256_and_si256(line.h, _mm256_set1_epi8(15))};
  }
  static INLINE Line high(const u8* p) {
    Line line = Int4::line(p);
    return {_mm256_and_si256(_mm256_srli_epi16(line.l, 4), _mm256_set1_epi8(15)),
            _mm256_and_si256(_mm256_srli_epi16(line.h, 4), _mm256_set1_epi8(15))};
  }
  static INLINE Line line(const u8* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  static INLINE void store_line(u8* p, Line line) {
    __m256i* q = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(q, line.l);
    _mm256_storeu_si256(q + 1, line.h);
  }
  static INLINE Left left(i32 bytes) { return _mm256_set1_epi32(bytes); }
  static INLINE Sum start(i32 offset) { return {_mm256_set1_epi32(offset), _mm256_set1_epi32(offset)}; }
  static INLINE Part open(const Sum&) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static INLINE Part step(const Part& part, const Line& w, Left a) {
    return {_mm256_add_epi16(part.l, _mm256_maddubs_epi16(w.l, a)), _mm256_add_epi16(part.h, _mm256_maddubs_epi16(w.h, a))};
  }
  static INLINE Sum close(const Sum& sum, const Part& part) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.l, _mm256_madd_epi16(part.l, ones)), _mm256_add_epi32(sum.h, _mm256_madd_epi16(part.h, ones))};
  }
  static INLINE Vec value(const Sum& sum) { return {_mm256_cvtepi32_ps(sum.l), _mm256_cvtepi32_ps(sum.h)}; }
};
#endif

// -8 times the sum of `count` elements of a row.
INLINE i32 int4_offset(const i8* row, i64 count) { return -8 * byte_sum(row, count); }

// M rows times P panels over k elements from the start of a group on: sums[m * stride + p * 16 + lane], continued unless
// `fresh`. WIDE: b holds a byte for each element, the four of the low bits in front of the four of the high ones. Groups
// are added in ascending order, whatever M, P and WIDE are.
template <bool WIDE, int M, int P>
__attribute__((noinline)) void int4_tile(const i8* const* a, const i32* const* offsets, const u8* const* b,
                                         const u16* const* scales, i64 k, i64 group, float* sums, i64 stride, bool fresh) {
  constexpr i64 line_bytes = WIDE ? 128 : 64;
  // Copies, which the stores to `sums` cannot change.
  const i8* rows[M];
  const i32* below[M];
  const u8* panels[P];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) rows[m] = a[m], below[m] = offsets[m];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) panels[p] = b[p];
  Vec total[M][P];
#pragma GCC unroll 16
  for (int i = 0; i < M * P; ++i)
    total[i / P][i % P] = fresh ? zero() : load(sums + i / P * stride + i % P * LANES);
  for (i64 g = 0; g * group < k; ++g) {
    Int4::Sum sum[M][P];
#pragma GCC unroll 16
    for (int i = 0; i < M * P; ++i) sum[i / P][i % P] = Int4::start(below[i / P][g]);
    const i64 end = (g + 1) * group < k ? (g + 1) * group : k;
    for (i64 first = g * group; first < end; first += FLUSH) {
      Int4::Part part[M][P];
#pragma GCC unroll 16
      for (int i = 0; i < M * P; ++i) part[i / P][i % P] = Int4::open(sum[i / P][i % P]);
      auto eight = [&](i64 at, i64 there) {  // of which `there` are in the row
        Int4::Line low[P], high[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
          const u8* from = panels[p] + (at >> 3) * line_bytes;
          low[p] = WIDE ? Int4::line(from) : Int4::low(from);
          high[p] = WIDE ? Int4::line(from + 64) : Int4::high(from);
          if (!WIDE) fetch_l2(from + INT4_PREFETCH_BYTES);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          Int4::Left x = Int4::left(there >= 4 ? four(rows[m] + at) : four(rows[m] + at, there));
#pragma GCC unroll 16
          for (int p = 0; p < P; ++p) part[m][p] = Int4::step(part[m][p], low[p], x);
          if (there <= 4) continue;
          x = Int4::left(there >= 8 ? four(rows[m] + at + 4) : four(rows[m] + at + 4, there - 4));
#pragma GCC unroll 16
          for (int p = 0; p < P; ++p) part[m][p] = Int4::step(part[m][p], high[p], x);
        }
      };
      if (end - first >= FLUSH) {
#pragma GCC unroll 4
        for (i64 i = 0; i < FLUSH; i += 8) eight(first + i, 8);
      } else {
        for (i64 at = first; at < end; at += 8) eight(at, end - at);
      }
#pragma GCC unroll 16
      for (int i = 0; i < M * P; ++i) sum[i / P][i % P] = Int4::close(sum[i / P][i % P], part[i / P][i % P]);
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      Vec scale = load_half(scales[p] + g * 16);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[m][p] = fma(Int4::value(sum[m][p]), scale, total[m][p]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M * P; ++i) store(sums + i / P * stride + i % P * LANES, total[i / P][i % P]);
}

// The bytes of k elements of a panel, [k / 4][16][4], each line of 64 as f makes it.
template <class F>
INLINE void int4_bytes(const u8* panel, i64 k, u8* to, F f) {
  for (i64 line = 0; line < (k + 7) / 8; ++line) {
    fetch_l1(panel + line * 64 + PREFETCH_BYTES);
    Int4::store_line(to + line * 128, f(Int4::low(panel + line * 64)));
    Int4::store_line(to + line * 128 + 64, f(Int4::high(panel + line * 64)));
  }
}

// Rows [0, rows) times P panels from `panel` on, at most M rows at a time; emit(row, panel, sums) as in `gemm_block`.
// offsets [rows][groups].
template <bool WIDE, int M, int P, class R, class E>
INLINE void int4_block(const Int4Panels& w, i64 panel, i64 rows, const i32* offsets, R row_of, E emit) {
  constexpr i64 width = P * LANES;
  alignas(64) float sums[INT4_BLOCK_ROWS * width];
  alignas(64) u8 wide[WIDE ? P * INT4_BLOCK_K * 16 : 1];
  const i64 block = WIDE ? INT4_BLOCK_K : w.k;
  for (i64 k0 = 0; k0 < w.k; k0 += block) {
    const bool is_last = k0 + block >= w.k;
    const i64 k = is_last ? w.k - k0 : block;
    const u8* panels[P];
    const u16* scales[P];
    for (int p = 0; p < P; ++p) {
      panels[p] = w.panel(panel + p) + k0 * 8;
      scales[p] = w.scales(panel + p) + k0 / w.group * 16;
      if constexpr (WIDE) {
        u8* to = wide + p * INT4_BLOCK_K * 16;
        int4_bytes(panels[p], k, to, [](const Int4::Line& line) { return line; });
        panels[p] = to;
      }
    }
    row_tiles(rows, M, [&](i64 row, i64 height) {
      const i8* a[M];
      const i32* below[M];
      for (i64 m = 0; m < height; ++m) {
        a[m] = row_of(row + m) + k0;
        below[m] = offsets + (row + m) * w.groups() + k0 / w.group;
      }
      float* part = sums + row * width;
      auto run = [&]<int H>(std::integral_constant<int, H>) {
        if constexpr (H <= M)
          if (height == H) int4_tile<WIDE, H, P>(a, below, panels, scales, k, w.group, part, width, k0 == 0);
      };
#define ROWS(H) run(std::integral_constant<int, H>());
      if constexpr (P > 1 || M <= 6) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
      } else {
        ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
      }
#undef ROWS
      if (!is_last) return;
      for (i64 m = 0; m < height; ++m)
        for (int p = 0; p < P; ++p) emit(row + m, panel + p, load(part + m * width + p * LANES));
    });
  }
}

#ifdef __AVX512VNNI__
// 16 rows, those of a tile and what lies behind them, times one panel of bytes with signs over k elements from the start
// of a group on: as `int4_tile`, but tiles add up the integers of a group. A group of 32 takes a tile of half lines.
// The sums of all groups stay in registers, so that a group costs its tiles, 16 stores and 16 times load, convert and
// multiply-add. By the instructions' throughput (not measured) that is some 25 cycles where VNNI takes 80 for a group of
// 32, and the larger the group, the more is gained.
inline __attribute__((noinline)) void int4_on_tiles(const RowTiles& a, const i8* b, const u16* scales, i64 k, i64 group,
                                                    float* sums, bool fresh) {
  constexpr i8* type = nullptr;
  const i64 line = group < TILE_LINE ? group : TILE_LINE;
  alignas(64) i32 parts[2][TILE_HEIGHT * LANES] = {};  // those of rows that are not there stay zero
  Vec total[TILE_HEIGHT];
#pragma GCC unroll 16
  for (int r = 0; r < TILE_HEIGHT; ++r) total[r] = fresh ? zero() : load(sums + r * LANES);
  // Two tiles of sums in turn: one is added up while the other is stored.
  const char* rows = a.first;
  const i64 row_stride = a.stride, row_step = a.step;
  auto add_group = [&]<int C>(std::integral_constant<int, C>, i64 g) __attribute__((always_inline)) {
    const i64 end = (g + 1) * group < k ? (g + 1) * group : k;
    amx::zero<C>();
    for (i64 at = g * group; at < end; at += line, rows += row_step) {
      amx::load<4>(rows, row_stride);
      amx::load<6 + C>(b + at * 16, TILE_LINE);
      amx::dot<C, 4, 6 + C>(type);
    }
    amx::store<C>(parts[C], TILE_LINE);
    const Vec scale = load_half(scales + g * 16);
#pragma GCC unroll 16
    for (int r = 0; r < TILE_HEIGHT; ++r) total[r] = fma(to_float(iload(parts[C] + r * LANES)), scale, total[r]);
  };
  i64 g = 0;
  for (; (g + 1) * group < k; g += 2) {
    add_group(std::integral_constant<int, 0>(), g);
    add_group(std::integral_constant<int, 1>(), g + 1);
  }
  if (g * group < k) add_group(std::integral_constant<int, 0>(), g);
#pragma GCC unroll 16
  for (int r = 0; r < TILE_HEIGHT; ++r) store(sums + r * LANES, total[r]);
}

// The panels [begin, end), a block of k of each put as bytes into the first-level cache.
template <class R, class E>
__attribute__((noinline)) void int4_tile_panels(const Int4Panels& w, i64 begin, i64 end, i64 rows, R row_of, E emit) {
  alignas(64) float sums[INT4_BLOCK_ROWS * LANES];
  alignas(64) u8 bytes[INT4_BLOCK_K * 16];
  alignas(64) i8 room[TILE_HEIGHT * INT4_BLOCK_K];
  const i64 line = w.group < TILE_LINE ? w.group : TILE_LINE;
  for (i64 panel = begin; panel < end; ++panel)
    for (i64 k0 = 0; k0 < w.k; k0 += INT4_BLOCK_K) {
      const bool is_last = k0 + INT4_BLOCK_K >= w.k;
      const i64 k = is_last ? w.k - k0 : INT4_BLOCK_K;
      int4_bytes(w.panel(panel) + k0 * 8, k, bytes,
                 [](__m512i stored) { return _mm512_sub_epi8(stored, _mm512_set1_epi8(8)); });
      for (i64 row = 0; row < rows; row += TILE_HEIGHT) {
        const i64 high = rows - row < TILE_HEIGHT ? rows - row : TILE_HEIGHT;
        shape_tiles(high, 0, line);
        float* part = sums + row * LANES;
        int4_on_tiles(row_tiles_of<i8>(row_of, row, high, k0, k, line, room), reinterpret_cast<const i8*>(bytes),
                      w.scales(panel) + k0 / w.group * 16, k, w.group, part, k0 == 0);
        if (!is_last) continue;
        for (i64 m = 0; m < high; ++m) emit(row + m, panel, load(part + m * LANES));
      }
    }
}
#endif

// The panels [begin, end), of at most INT4_BLOCK_ROWS rows: a few rows read them once and take them apart in registers,
// for more they are put as bytes into the first-level cache. Not inlined: what it takes of the stack it then gives back.
template <class R, class E>
__attribute__((noinline)) void int4_panels(const Int4Panels& w, i64 begin, i64 end, i64 rows, R row_of, E emit) {
  if constexpr (AMX)
    if (rows > INT4_TALL_ROWS) return int4_tile_panels(w, begin, end, rows, row_of, emit);
  const i64 groups = w.groups();
  i32* offsets = static_cast<i32*>(__builtin_alloca(size_t(rows * groups) * sizeof(i32)));
  for (i64 row = 0; row < rows; ++row)
    for (i64 g = 0; g < groups; ++g) {
      i64 count = w.k - g * w.group < w.group ? w.k - g * w.group : w.group;
      offsets[row * groups + g] = int4_offset(row_of(row) + g * w.group, count);
    }
  i64 panel = begin;
#define BLOCKS(WIDE, M, P) \
  for (; panel + P <= end; panel += P) int4_block<WIDE, M, P>(w, panel, rows, offsets, row_of, emit)
  if constexpr (INT4_TALL_ROWS > 0) {
    if (rows <= 2) BLOCKS(false, 2, 1);
    else if (rows <= 6) BLOCKS(false, 6, 2);
    else if (rows <= 2 * INT4_TALL_ROWS) BLOCKS(false, 12, 1);
    else BLOCKS(true, 6, 2);
    if (rows <= 6) BLOCKS(false, 6, 1);
    else BLOCKS(true, 6, 1);
  } else {
    if (rows <= INT4_ROWS) BLOCKS(false, INT4_ROWS, 1);
    else BLOCKS(true, INT4_ROWS, 1);
  }
#undef BLOCKS
}

// x [rows, k] with x_scale [rows, 1]; the bias in T, the result in O.
template <class T, class O>
KERNEL void linear_w4a8(Team& team, Rows<const i8> x, Rows<const float> x_scale, i64 rows, Int4Panels w, const T* bias,
                        Written<O> out) {
  pieces(team, {rows, INT4_BLOCK_ROWS}, w.count(), false, 0, [&](i64 row0, i64 row1, i64 first, i64 last, i64) {
    int4_panels(
        w, first, last, row1 - row0, [&](i64 row) { return x[row0 + row]; },
        [=, n = w.n](i64 row, i64 panel, Vec sums) {
          i64 width = n - panel * 16;
          Vec scaled = mul(sums, set1(*x_scale[row0 + row]));
          out(row0 + row, panel * 16, finished<T>(scaled, nullptr, bias, panel * 16, width), width);
        });
  });
}

}  // namespace inferc
