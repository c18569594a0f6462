// Products of int8 rows with weights in four bits (W4A8). A weight is its integer, -8 to 7, times its group's scale,
// -127 to 127, times its output's scale in float32. All but the last are integers, whose sums are exact in any order.
//
// A panel's bytes are stored as those of an int8 weight of half the k, [k / 8][16][4]: of each eight k of an output the
// low bits hold the first four, the high bits the others. An integer is stored plus 8, so that it is unsigned, as
// vpdpbusd and vpmaddubsw need their first factor. The sum of 32 then starts lower by 8 times the row's own sum, fits
// into 16 bits, and is added to the output's sum by one multiply-add of 16 bits.
#pragma once
#include "gemm.h"

namespace inferc {

struct Int4Panels {
  const u8* data;
  const i8* scale;  // scales of groups: [n / 16][groups][16]
  i64 n, k, group;  // group is a multiple of 32
  const Blocking* blocking = &ANY_BLOCKING;
  INLINE Int4Panels for_rows(i64 rows) const {
    Int4Panels chosen = *this;
    while (chosen.blocking->up_to < rows) ++chosen.blocking;
    return chosen;
  }
  INLINE i64 groups() const { return (k + group - 1) / group; }
  INLINE i64 count() const { return (n + 15) / 16; }
  INLINE const u8* panel(i64 p) const { return data + p * groups() * group * 8; }
  INLINE const i8* scales(i64 p) const { return scale + p * groups() * 16; }
};

constexpr i64 FLUSH = 32;            // k: as many products as a sum in 16 bits holds
constexpr i64 INT4_BLOCK_K = 512;    // k that is expanded to bytes at a time; a multiple of every group size
constexpr i64 INT4_VECTOR_ROWS = 2;  // up to so many rows, tiles are no faster than vectors
constexpr i64 INT4_PREFETCH_BYTES = 3072;  // bytes of a panel to prefetch, where one or two are read at a time

#ifdef __AVX512VNNI__
constexpr int INT4_ROWS = 6, INT4_TALL_ROWS = 12;

struct Int4 {
  using Line = __m512i;  // 16 outputs by four of k
  using Left = __m512i;
  using Part = __m512i;  // sums of 32, in 32 bits
  using Scale = __m512i;
  static INLINE Line low(const u8* p) { return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15)); }
  static INLINE Line high(const u8* p) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
  }
  static INLINE Line line(const u8* p) { return _mm512_loadu_si512(p); }
  static INLINE void store_line(u8* p, Line line) { _mm512_storeu_si512(p, line); }
  static INLINE Left left(i32 bytes) { return _mm512_set1_epi32(bytes); }
  static INLINE Part start(i32 offset) { return _mm512_set1_epi32(offset); }
  static INLINE Part step(Part part, Line w, Left a) { return _mm512_dpbusd_epi32(part, w, a); }
  static INLINE __m512i wide_scale(const i8* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // A part has all its bits in the low half of 32, so the scale is put into the low half too.
  static INLINE Scale scale(const i8* p) { return _mm512_and_si512(wide_scale(p), _mm512_set1_epi32(0xffff)); }
  static INLINE IVec add(IVec total, Part part, Scale scale) { return {_mm512_dpwssd_epi32(total.v, part, scale)}; }
};
#elif defined(__aarch64__)
constexpr int INT4_ROWS = 4, INT4_TALL_ROWS = 0;

// sdot takes both factors as signed, and four bits plus 8 are a positive signed number too.
struct Int4 {
  using Line = IVec;
  using Left = Dot<i8>::A;
  using Part = IVec;  // sums of 32
  using Scale = IVec;
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
  static INLINE Part start(i32 offset) { return iset1(offset); }
  static INLINE Part step(const Part& part, const Line& w, Left a) { return Dot<i8>::step(part, a, w); }
  static INLINE Scale scale(const i8* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
  }
  static INLINE IVec add(const IVec& total, const Part& part, const Scale& scale) {
    return {{vmlaq_s32(total.q[0], part.q[0], scale.q[0]), vmlaq_s32(total.q[1], part.q[1], scale.q[1]),
             vmlaq_s32(total.q[2], part.q[2], scale.q[2]), vmlaq_s32(total.q[3], part.q[3], scale.q[3])}};
  }
};
#else
constexpr int INT4_ROWS = 2, INT4_TALL_ROWS = 0;

struct Int4 {
  struct Pair {
    __m256i l, h;
  };
  using Line = Pair;
  using Left = __m256i;
  using Part = Pair;   // sums of 16 products, in 16 bits: two of them for an output
  using Scale = Pair;  // two for an output, as Part
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
  // Each of an output's two 16-bit lanes starts at half the offset, so that neither overflows as products are added.
  static INLINE Part start(i32 offset) {
    return {_mm256_set1_epi16(short(offset / 2)), _mm256_set1_epi16(short(offset / 2))};
  }
  static INLINE Part step(const Part& part, const Line& w, Left a) {
    return {_mm256_add_epi16(part.l, _mm256_maddubs_epi16(w.l, a)),
            _mm256_add_epi16(part.h, _mm256_maddubs_epi16(w.h, a))};
  }
  static INLINE Scale scale(const i8* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes)),
            _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(bytes, bytes))};
  }
  static INLINE IVec add(const IVec& total, const Part& part, const Scale& scale) {
    return {_mm256_add_epi32(total.l, _mm256_madd_epi16(part.l, scale.l)),
            _mm256_add_epi32(total.h, _mm256_madd_epi16(part.h, scale.h))};
  }
};
#endif

// Returns -8 times the sum of `count` elements of a row.
INLINE i32 int4_offset(const i8* row, i64 count) { return -8 * byte_sum(row, count); }

// Computes these offsets for all k of a row.
INLINE void int4_offsets(const i8* row, i64 k, i32* offsets) {
#ifdef __AVX512VNNI__
  for (; k >= 2 * FLUSH; k -= 2 * FLUSH, row += 2 * FLUSH, offsets += 2) {
    // Sums of bytes made unsigned, each larger by 128, eight at a time.
    __m512i sums =
        _mm512_sad_epu8(_mm512_xor_si512(_mm512_loadu_si512(row), _mm512_set1_epi8(-128)), _mm512_setzero_si512());
    sums = _mm512_add_epi64(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
    sums = _mm512_add_epi64(sums, _mm512_permutex_epi64(sums, 0x4e));
    offsets[0] = -8 * (_mm512_cvtsi512_si32(sums) - 128 * i32(FLUSH));
    offsets[1] = -8 * (_mm256_cvtsi256_si32(_mm512_extracti64x4_epi64(sums, 1)) - 128 * i32(FLUSH));
  }
#endif
  for (; k > 0; k -= FLUSH, row += FLUSH) *offsets++ = int4_offset(row, k < FLUSH ? k : FLUSH);
}

// Multiplies M rows by P panels over k elements from the start of a group on: sums[m * stride + p * 16 + lane],
// continued unless `fresh`. offsets [k / 32] of each row. WIDE: b holds a byte for each element, the four from the low
// bits in front of the four from the high bits; otherwise lines are prefetched before they are multiplied, and where
// panels end, the memory `next` bytes after each.
template <bool WIDE, int M, int P>
__attribute__((noinline)) void int4_tile(const i8* const* a, const i32* const* offsets, const u8* const* b,
                                         const i8* const* scales, i64 next, i64 k, i64 group, i32* sums, i64 stride,
                                         bool fresh) {
  constexpr i64 line_bytes = WIDE ? 128 : 64, front = P < 4 ? INT4_PREFETCH_BYTES : FETCH_BYTES / P;
  const i64 bytes = (k + group - 1) / group * group * 8, next_scales = P * ((k + group - 1) / group) * 16;
  // Copies, since the compiler would assume that the stores to `sums` change the originals.
  const i8* rows[M];
  const i32* below[M];
  const u8* panels[P];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) rows[m] = a[m], below[m] = offsets[m];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) panels[p] = b[p];
  IVec total[M][P];
#pragma GCC unroll 16
  for (int i = 0; i < M * P; ++i)
    total[i / P][i % P] = fresh ? iset1(0) : iload(sums + i / P * stride + i % P * LANES);
  for (i64 g = 0; g * group < k; ++g) {
    const i64 end = (g + 1) * group < k ? (g + 1) * group : k;
    for (i64 first = g * group; first < end; first += FLUSH) {
      const i64 fetched = first * 8 + front < bytes ? front : front + next;
      Int4::Part part[M][P];
#pragma GCC unroll 16
      for (int i = 0; i < M * P; ++i) part[i / P][i % P] = Int4::start(below[i / P][first / FLUSH]);
      auto eight = [&](i64 at, i64 there) {  // `there` of the eight are in the row
        Int4::Line low[P], high[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
          const u8* from = panels[p] + (at >> 3) * line_bytes;
          low[p] = WIDE ? Int4::line(from) : Int4::low(from);
          high[p] = WIDE ? Int4::line(from + 64) : Int4::high(from);
          if (!WIDE) fetch_l2(from + fetched);
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
      for (int p = 0; p < P; ++p) {
        const Int4::Scale scale = Int4::scale(scales[p] + g * 16);
        if (!WIDE && g % 4 == 0) fetch_l2(scales[p] + g * 16 + next_scales);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) total[m][p] = Int4::add(total[m][p], part[m][p], scale);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M * P; ++i) store(sums + i / P * stride + i % P * LANES, total[i / P][i % P]);
}

// Expands k elements of a panel to bytes, [k / 4][16][4].
INLINE void int4_bytes(const u8* panel, i64 k, u8* to) {
  for (i64 line = 0; line < (k + 7) / 8; ++line) {
    fetch_l1(panel + line * 64 + PREFETCH_BYTES);
    Int4::store_line(to + line * 128, Int4::low(panel + line * 64));
    Int4::store_line(to + line * 128 + 64, Int4::high(panel + line * 64));
  }
}

// Multiplies rows [0, rows) by P panels from `panel` on, at most M rows at a time; emit(row, panel, sums) as in
// `gemm_block`. offsets [rows][k / 32], rounded up. next: the panel that the thread multiplies next.
template <bool WIDE, int M, int P, class R, class E>
INLINE void int4_block(const Int4Panels& w, i64 panel, i64 next, i64 rows, const i32* offsets, R row_of, E emit) {
  constexpr i64 width = P * LANES;
  alignas(64) i32 sums[BLOCK_ROWS * width];
  alignas(64) u8 wide[WIDE ? P * INT4_BLOCK_K * 16 : 1];
  const i64 block = WIDE ? INT4_BLOCK_K : w.k;
  const i64 to_next = bytes_between(w.panel(panel + 1), w.panel(next));
  for (i64 k0 = 0; k0 < w.k; k0 += block) {
    const bool is_last = k0 + block >= w.k;
    const i64 k = is_last ? w.k - k0 : block;
    const u8* panels[P];
    const i8* scales[P];
    for (int p = 0; p < P; ++p) {
      panels[p] = w.panel(panel + p) + k0 * 8;
      scales[p] = w.scales(panel + p) + k0 / w.group * 16;
      if constexpr (WIDE) {
        u8* to = wide + p * INT4_BLOCK_K * 16;
        int4_bytes(panels[p], k, to);
        panels[p] = to;
      }
    }
    row_tiles(rows, M, [&](i64 row, i64 height) {
      const i8* a[M];
      const i32* below[M];
      for (i64 m = 0; m < height; ++m) {
        a[m] = row_of(row + m) + k0;
        below[m] = offsets + ((row + m) * ((w.k + FLUSH - 1) / FLUSH) + k0 / FLUSH);
      }
      i32* part = sums + row * width;
      auto run = [&]<int H>(std::integral_constant<int, H>) {
        if constexpr (H <= M)
          if (height == H) int4_tile<WIDE, H, P>(a, below, panels, scales, to_next, k, w.group, part, width, k0 == 0);
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
        for (int p = 0; p < P; ++p) emit(row + m, panel + p, iload(part + m * width + p * LANES));
    });
  }
}

#ifdef __AVX512VNNI__
// On tiles a weight becomes two bytes: its integer times the high and times the low four bits of its group's scale
// without the sign, which is applied to the integer instead. A sum is put together from the two likewise.
struct Int4Planes {
  __m512i low, high;  // the four bits, in the first of two bytes: a product of 16 bits is one of either byte
  __m512i below_low, below_high;  // what to subtract from the products, since integers are stored plus 8
  __m512i turned;
  INLINE explicit Int4Planes(const i8* scales) {
    const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    const __m512i fours = _mm512_set1_epi8(15), even = _mm512_set1_epi16(0x00ff);
    const __m512i all = _mm512_shuffle_epi8(Int4::wide_scale(scales), first), size = _mm512_abs_epi8(all);
    const __mmask64 negative = _mm512_movepi8_mask(all);
    const __m512i lows = _mm512_and_si512(size, fours), highs = _mm512_and_si512(_mm512_srli_epi16(size, 4), fours);
    // With the sign changed, an integer plus 8 is 15 minus it: 7 more than the value that it stands for.
    auto below = [&](__m512i bits) {
      const __m512i eightfold = _mm512_slli_epi16(bits, 3);
      return _mm512_mask_sub_epi8(eightfold, negative, eightfold, bits);
    };
    low = _mm512_and_si512(lows, even), high = _mm512_and_si512(highs, even);
    below_low = below(lows), below_high = below(highs);
    turned = _mm512_maskz_mov_epi8(negative, fours);
  }
  INLINE void put(__m512i integers, i8* to_low, i8* to_high) const {
    _mm512_storeu_si512(to_low, _mm512_sub_epi8(_mm512_mullo_epi16(integers, low), below_low));
    _mm512_storeu_si512(to_high, _mm512_sub_epi8(_mm512_mullo_epi16(integers, high), below_high));
  }
};

// Makes both bytes of k elements of a panel, within one group: [k / 4][16][4] each.
INLINE void int4_planes(const u8* panel, const i8* scales, i64 k, i8* low, i8* high) {
  const Int4Planes planes(scales);
  auto bits = [&](__m512i line) {  // four bits of each byte, with the sign applied
    return _mm512_ternarylogic_epi32(line, _mm512_set1_epi8(15), planes.turned, 0x6a);
  };
  for (i64 at = 0; at < k; at += 8, panel += 64, low += 128, high += 128) {
    fetch_l2(panel + INT4_PREFETCH_BYTES);
    const __m512i line = _mm512_loadu_si512(panel);
    planes.put(bits(line), low, high);
    planes.put(bits(_mm512_srli_epi16(line, 4)), low + 64, high + 64);
  }
}

// Multiplies one panel by one or two tiles of rows over whole tiles of k. The tiles of weights are made on the way, the
// next ones while the current ones are multiplied. Sums are written as by `multiply_tiles`, those of low bits beside
// those of high bits. What a last tile has after the end of k is multiplied by zeros.
template <int M>
__attribute__((noinline)) void int4_stream(const Int4Panels& w, i64 panel, const RowTiles& a, i32* to) {
  constexpr i8* type = nullptr;
  constexpr i64 line = 2 * TILE_LINE, page = 4096;
  // A load waits for an earlier store whose address differs by a multiple of a page, until the processor knows that
  // they differ. So rows are loaded before the stores, and tiles go into the half of a page in which the panel's bytes
  // are not.
  alignas(page) i8 room[2][page];
  const u8* data = w.panel(panel);
  const i8* scales = w.scales(panel);
  const i64 steps = (w.k + TILE_LINE - 1) / TILE_LINE, group = w.group, part = group < TILE_LINE ? group : TILE_LINE;
  i64 passed = 0;  // k that has passed of the current group
  auto make = [&](i64 step) __attribute__((always_inline)) {
    i8* low = room[step & 1] + (~reinterpret_cast<uintptr_t>(data) & (page / 2));
    const i64 here = w.k - step * TILE_LINE < TILE_LINE ? w.k - step * TILE_LINE : TILE_LINE;
    for (i64 at = 0; at < here; at += part) {
      int4_planes(data + at * 8, scales, part, low + at * 16, low + at * 16 + TILE_BYTES);
      passed += part;
      if (passed == group) passed = 0, scales += 16;
    }
    data += TILE_LINE * 8;
    return low;
  };
  amx::zero<0>(), amx::zero<1>();
  if constexpr (M == 2) amx::zero<2>(), amx::zero<3>();
  const char *rows = a.first, *more = a.second;
  const i8* low = make(0);
  for (i64 i = 0; i < steps; ++i, rows += a.step, more += a.step) {
    amx::load<4>(rows, a.stride);
    if constexpr (M == 2) amx::load<5>(more, a.stride);
    const i8* next = i + 1 < steps ? make(i + 1) : nullptr;
    amx::load<6>(low, TILE_LINE);
    amx::load<7>(low + TILE_BYTES, TILE_LINE);
    amx::dot<0, 4, 6>(type), amx::dot<1, 4, 7>(type);
    if constexpr (M == 2) amx::dot<2, 5, 6>(type), amx::dot<3, 5, 7>(type);
    low = next;
  }
  amx::store<0>(to, line), amx::store<1>(to + LANES, line);
  to += TILE_HEIGHT * 2 * LANES;
  if constexpr (M == 2) amx::store<2>(to, line), amx::store<3>(to + LANES, line);
}

// Multiplies panels [begin, end) on tiles, each made again for every 32 rows: that is cheaper than keeping tiles and
// sums.
template <class R, class E>
__attribute__((noinline)) void int4_tile_panels(const Int4Panels& w, i64 begin, i64 end, i64 rows, R row_of, E emit) {
  constexpr i64 width = 2 * LANES;
  i8* packed = nullptr;
  if (const i64 bytes = packed_bytes<i8>(row_of, rows, w.k))
    packed = static_cast<i8*>(__builtin_alloca_with_align(size_t(bytes), 8 * TILE_LINE));
  const TiledRows x = tiled_rows(row_of, rows, w.k, packed);
  alignas(64) i32 sums[TILE_PAIR * width];
  for (i64 panel = begin; panel < end; ++panel)
    for (i64 row = 0; row < rows; row += TILE_PAIR) {
      const i64 height = rows - row < TILE_PAIR ? rows - row : TILE_PAIR;
      shape_tiles(height < TILE_HEIGHT ? height : TILE_HEIGHT, height > TILE_HEIGHT ? height - TILE_HEIGHT : 0);
      if (height > TILE_HEIGHT) int4_stream<2>(w, panel, x.at(row, 0), sums);
      else int4_stream<1>(w, panel, x.at(row, 0), sums);
      for (i64 m = 0; m < height; ++m)
        emit(row + m, panel, add(iload(sums + m * width), left_by<4>(iload(sums + m * width + LANES))));
    }
}
#endif

// Whether panels are read once, and prefetched.
INLINE bool fetches_int4(i64 rows) { return rows <= (INT4_TALL_ROWS > 0 ? INT4_VECTOR_ROWS : INT4_ROWS); }

// Multiplies the panels [begin, end). For few rows they are read once and unpacked in registers; for more rows they are
// expanded to bytes in the first-level cache. after: the panel that the thread multiplies next, or -1. Not inlined: so
// its stack is released when it returns.
template <class R, class E>
__attribute__((noinline)) void int4_panels(const Int4Panels& w, i64 begin, i64 end, i64 after, i64 rows, R row_of,
                                           E emit) {
  if constexpr (AMX)
    if (rows > INT4_VECTOR_ROWS) return int4_tile_panels(w, begin, end, rows, row_of, emit);
  const i64 parts = (w.k + FLUSH - 1) / FLUSH;
  i32* offsets = static_cast<i32*>(__builtin_alloca(size_t(rows * parts) * sizeof(i32)));
  for (i64 row = 0; row < rows; ++row)
    int4_offsets(row_of(row), w.k, offsets + row * parts);
  i64 panel = begin;
#define BLOCKS(WIDE, M, P) \
  for (; panel + P <= end; panel += P) \
    int4_block<WIDE, M, P>(w, panel, panel + P < end || after < 0 ? panel + P : after, rows, offsets, row_of, emit)
  if constexpr (INT4_TALL_ROWS > 0) {
    if (rows <= 2) BLOCKS(false, 2, 4);
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

// Multiplies x [rows, k] with x_scale [rows, 1]; scale [n]; the bias is in T, the result in O.
template <class T, class O>
KERNEL void linear_w4a8(Team& team, Rows<const i8> x, Rows<const float> x_scale, i64 rows, Int4Panels w,
                        const float* scale, const T* bias, Written<O> out) {
  const auto emit = written_from(FromIntegers<T>{x_scale, scale, bias}, out);
  const RowBlocks blocks = row_blocks_of<i8>(rows, *w.for_rows(rows).blocking);
  pieces(team, blocks, w.count(), fetches_int4(rows), 0, [&](i64 row0, i64 row1, i64 first, i64 last, i64 after) {
    int4_panels(
        w, first, last, after, row1 - row0, [&](i64 row) { return x[row0 + row]; },
        [emit, row0, n = w.n](i64 row, i64 panel, IVec acc) { emit(row0 + row, panel * 16, acc, n - panel * 16); });
  });
}

}  // namespace inferc
