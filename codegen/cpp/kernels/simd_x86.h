// The vectors of simd.h on AVX-512 and AVX2, and other instructions of x86-64.
#pragma once
#include <immintrin.h>

namespace inferc {

#ifdef __AVX512F__

struct Vec {
  __m512 v;
};
INLINE Vec zero() { return {_mm512_setzero_ps()}; }
INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE Vec widened(__m256i half) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))}; }
INLINE Vec load(const bf16* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
INLINE Vec load(const i8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
// Rounds to bfloat16 and keeps denormals, which vcvtneps2bf16 would make zero: so both variants round alike.
INLINE __m256i narrow(Vec x) {
  if (__builtin_expect(_mm512_fpclass_ps_mask(x.v, 0x20) == 0, 1)) return __m256i(_mm512_cvtneps_pbh(x.v));
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  __m512i out = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), quiet);
  return _mm512_cvtepi32_epi16(out);
}
INLINE void store_normal(bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), __m256i(_mm512_cvtneps_pbh(x.v)));
}
INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// Division up to the last bits, for a divisor from 2^-126 to 2^126: by a reciprocal of 14 bits, corrected once.
INLINE Vec near_div(Vec a, Vec b) {
  const __m512 first = _mm512_rcp14_ps(b.v);
  return {_mm512_mul_ps(a.v, _mm512_fmadd_ps(first, _mm512_fnmadd_ps(b.v, first, _mm512_set1_ps(1.0f)), first))};
}
INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for whole n; a result that is too small becomes 0.
INLINE Vec scale2(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Lanes [low, high) of x, `other` elsewhere.
INLINE Vec keep(Vec x, int low, int high, Vec other) {
  u32 mask = (high >= 16 ? 0xffffu : (1u << (high < 0 ? 0 : high)) - 1) &
             ~(low >= 16 ? 0xffffu : (1u << (low < 0 ? 0 : low)) - 1);
  return {_mm512_mask_mov_ps(other.v, __mmask16(mask), x.v)};
}
// The lanes of x whose bit is set, `other` elsewhere.
INLINE Vec only(Vec x, u32 lanes, Vec other) { return {_mm512_mask_mov_ps(other.v, __mmask16(lanes), x.v)}; }
// a < b ? x : y, lane by lane.
INLINE Vec less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}
// a >= b ? x : 0, lane by lane; 0 where one is NaN.
INLINE Vec at_least(Vec a, Vec b, Vec x) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)};
}
// Bit i: whether the condition holds in lane i.
INLINE u32 lanes_at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
INLINE u32 lanes_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
// Stores the lanes whose bit is set without gaps at p, where there is room for 16; returns their number.
INLINE i64 store_packed(float* p, Vec x, u32 lanes) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(lanes), x.v));
  return __builtin_popcount(lanes);
}
INLINE __m256 low_half(Vec x) { return _mm512_castps512_ps256(x.v); }
INLINE __m256 high_half(Vec x) { return _mm512_extractf32x8_ps(x.v, 1); }

// Sixteen int32 lanes; load and store take the address of any type with 64 bytes.
struct IVec {
  __m512i v;
};
INLINE IVec iset1(i32 x) { return {_mm512_set1_epi32(x)}; }
INLINE IVec iload(const void* p) { return {_mm512_loadu_si512(p)}; }
INLINE void store(void* p, IVec x) { _mm512_storeu_si512(p, x.v); }
INLINE IVec add(IVec a, IVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE IVec bits_or(IVec a, IVec b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
INLINE IVec left_by(IVec a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N>
INLINE IVec right_by(IVec a) { return {_mm512_srai_epi32(a.v, N)}; }
template <int N>
INLINE IVec zeros_right_by(IVec a) { return {_mm512_srli_epi32(a.v, N)}; }
INLINE bool any(IVec a) { return _mm512_test_epi32_mask(a.v, a.v) != 0; }
INLINE Vec to_float(IVec a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE IVec bits_of(Vec a) { return {_mm512_castps_si512(a.v)}; }
// Whole numbers in [-127, 127].
INLINE void store(i8* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

#else

struct Vec {
  __m256 l, h;
};
INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE Vec load(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
INLINE Vec load(const i8* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.l);
  _mm256_storeu_ps(p + 8, x.h);
}
INLINE __m256i narrow(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
INLINE __m256i narrow(Vec x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(x.l), narrow(x.h)), 0xd8);
}
INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.l, b.l), _mm256_add_ps(a.h, b.h)}; }
INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.l, b.l), _mm256_sub_ps(a.h, b.h)}; }
INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.l, b.l), _mm256_mul_ps(a.h, b.h)}; }
INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.l, b.l), _mm256_div_ps(a.h, b.h)}; }
INLINE Vec near_div(Vec a, Vec b) { return div(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)}; }
INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.l, b.l), _mm256_max_ps(a.h, b.h)}; }
INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.l, b.l), _mm256_min_ps(a.h, b.h)}; }
INLINE Vec nearest(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.l, mode), _mm256_round_ps(a.h, mode)};
}
INLINE __m256 power2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// x * 2^n in two steps, so that n = 128 and denormal results work.
INLINE __m256 scale2(__m256 x, __m256 n) {
  __m256 half = _mm256_round_ps(_mm256_mul_ps(n, _mm256_set1_ps(0.5f)), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm256_mul_ps(_mm256_mul_ps(x, power2(half)), power2(_mm256_sub_ps(n, half)));
}
INLINE Vec scale2(Vec x, Vec n) { return {scale2(x.l, n.l), scale2(x.h, n.h)}; }
INLINE __m256 lanes_below(int n, int first) {
  __m256i index = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index));
}
INLINE Vec keep(Vec x, int low, int high, Vec other) {
  __m256 l = _mm256_andnot_ps(lanes_below(low, 0), lanes_below(high, 0));
  __m256 h = _mm256_andnot_ps(lanes_below(low, 8), lanes_below(high, 8));
  return {_mm256_blendv_ps(other.l, x.l, l), _mm256_blendv_ps(other.h, x.h, h)};
}
INLINE __m256 only(__m256 x, u32 lanes, __m256 other) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(i32(lanes)), bits), bits);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(set));
}
INLINE Vec only(Vec x, u32 lanes, Vec other) {
  return {only(x.l, lanes, other.l), only(x.h, lanes >> 8, other.h)};
}
INLINE Vec less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.l, x.l, _mm256_cmp_ps(a.l, b.l, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.h, x.h, _mm256_cmp_ps(a.h, b.h, _CMP_LT_OQ))};
}
INLINE Vec at_least(Vec a, Vec b, Vec x) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.l, b.l, _CMP_GE_OQ), x.l),
          _mm256_and_ps(_mm256_cmp_ps(a.h, b.h, _CMP_GE_OQ), x.h)};
}
INLINE u32 lanes_of(__m256 l, __m256 h) { return u32(_mm256_movemask_ps(l)) | u32(_mm256_movemask_ps(h)) << 8; }
INLINE u32 lanes_at_least(Vec a, Vec b) {
  return lanes_of(_mm256_cmp_ps(a.l, b.l, _CMP_GE_OQ), _mm256_cmp_ps(a.h, b.h, _CMP_GE_OQ));
}
INLINE u32 lanes_less(Vec a, Vec b) {
  return lanes_of(_mm256_cmp_ps(a.l, b.l, _CMP_LT_OQ), _mm256_cmp_ps(a.h, b.h, _CMP_LT_OQ));
}
// For each mask of eight lanes, the numbers of the lanes whose bit is set, one byte each, first in the line.
struct PackOrders {
  u64 of[256];
  constexpr PackOrders() : of() {
    for (int lanes = 0; lanes < 256; ++lanes)
      for (int lane = 0, count = 0; lane < 8; ++lane)
        if (lanes >> lane & 1) of[lanes] |= u64(lane) << (8 * count++);
  }
};
inline constexpr PackOrders PACK_ORDERS;

INLINE i64 store_packed(float* p, __m256 x, u32 lanes) {
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64(PACK_ORDERS.of[lanes])));
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, order));
  return __builtin_popcount(lanes);
}
INLINE i64 store_packed(float* p, Vec x, u32 lanes) {
  const i64 count = store_packed(p, x.l, lanes & 255);
  return count + store_packed(p + count, x.h, lanes >> 8);
}
INLINE __m256 low_half(Vec x) { return x.l; }
INLINE __m256 high_half(Vec x) { return x.h; }

struct IVec {
  __m256i l, h;
};
INLINE IVec iset1(i32 x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE IVec iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INLINE void store(void* p, IVec x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.l);
  _mm256_storeu_si256(q + 1, x.h);
}
INLINE IVec add(IVec a, IVec b) { return {_mm256_add_epi32(a.l, b.l), _mm256_add_epi32(a.h, b.h)}; }
INLINE IVec bits_or(IVec a, IVec b) { return {_mm256_or_si256(a.l, b.l), _mm256_or_si256(a.h, b.h)}; }
template <int N>
INLINE IVec left_by(IVec a) { return {_mm256_slli_epi32(a.l, N), _mm256_slli_epi32(a.h, N)}; }
template <int N>
INLINE IVec right_by(IVec a) { return {_mm256_srai_epi32(a.l, N), _mm256_srai_epi32(a.h, N)}; }
template <int N>
INLINE IVec zeros_right_by(IVec a) { return {_mm256_srli_epi32(a.l, N), _mm256_srli_epi32(a.h, N)}; }
INLINE bool any(IVec a) {
  const __m256i both = _mm256_or_si256(a.l, a.h);
  return !_mm256_testz_si256(both, both);
}
INLINE Vec to_float(IVec a) { return {_mm256_cvtepi32_ps(a.l), _mm256_cvtepi32_ps(a.h)}; }
INLINE IVec bits_of(Vec a) { return {_mm256_castps_si256(a.l), _mm256_castps_si256(a.h)}; }
INLINE void store(i8* p, Vec x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.l), _mm256_cvtps_epi32(x.h));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

#endif

INLINE float sum(Vec x) {
  __m256 a = _mm256_add_ps(low_half(x), high_half(x));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float maximum(Vec x) {
  __m256 a = _mm256_max_ps(low_half(x), high_half(x));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float first(Vec x) { return _mm_cvtss_f32(_mm256_castps256_ps128(low_half(x))); }

// Sixteen sums in double, one for each lane of the values that are added.
struct Wide {
#ifdef __AVX512F__
  __m512d l, h;
#else
  __m256d a, b, c, d;
#endif
};
INLINE Wide add(Wide sums, Vec x) {
#ifdef __AVX512F__
  return {_mm512_add_pd(sums.l, _mm512_cvtps_pd(low_half(x))), _mm512_add_pd(sums.h, _mm512_cvtps_pd(high_half(x)))};
#else
  auto wide = [](__m128 four) { return _mm256_cvtps_pd(four); };
  return {_mm256_add_pd(sums.a, wide(_mm256_castps256_ps128(x.l))),
          _mm256_add_pd(sums.b, wide(_mm256_extractf128_ps(x.l, 1))),
          _mm256_add_pd(sums.c, wide(_mm256_castps256_ps128(x.h))),
          _mm256_add_pd(sums.d, wide(_mm256_extractf128_ps(x.h, 1)))};
#endif
}
INLINE double sum(Wide x) {  // by halves, as above
#ifdef __AVX512F__
  const __m512d both = _mm512_add_pd(x.l, x.h);
  const __m256d a = _mm256_add_pd(_mm512_castpd512_pd256(both), _mm512_extractf64x4_pd(both, 1));
#else
  const __m256d a = _mm256_add_pd(_mm256_add_pd(x.a, x.c), _mm256_add_pd(x.b, x.d));
#endif
  const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
}

INLINE i32 byte_sum(const i8* p, i64 count) {
#ifdef __AVX512VNNI__
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i total = _mm512_setzero_si512();
  for (; count >= 64; count -= 64, p += 64) total = _mm512_dpbusd_epi32(total, ones, _mm512_loadu_si512(p));
  if (count) total = _mm512_dpbusd_epi32(total, ones, _mm512_maskz_loadu_epi8((u64(1) << count) - 1, p));
  return _mm512_reduce_add_epi32(total);
#else
  i32 total = 0;
  for (i64 i = 0; i < count; ++i) total += p[i];
  return total;
#endif
}

INLINE void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
INLINE void relax() { _mm_pause(); }
INLINE u64 ticks() { return __rdtsc(); }
INLINE u64 ticks_of(u64 cycles) { return cycles; }

}  // namespace inferc
