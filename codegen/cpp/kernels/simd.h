// Sixteen float32 lanes, the same functions on AVX-512 and AVX2, and the dot-product step of each storage type.
// Everything is an explicit instruction in a fixed order: a lane's result never depends on the other lanes.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE inline __attribute__((always_inline))

namespace inferc {

using i8 = int8_t;
using u8 = uint8_t;
using u16 = uint16_t;
using i32 = int32_t;
using i64 = int64_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct bf16 {
  uint16_t bits;
};

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  u32 bits = u32(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
INLINE void from_float(float& out, float x) { out = x; }
INLINE void from_float(bf16& out, float x) {  // to nearest, ties to even; NaN stays NaN
  u32 bits;
  memcpy(&bits, &x, 4);
  out.bits = x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class T>
INLINE float rounded(float x) {
  T out;
  from_float(out, x);
  return to_float(out);
}

constexpr int LANES = 16;

#ifdef __AVX512F__

struct Vec {
  __m512 v;
};
INLINE Vec zero() { return {_mm512_setzero_ps()}; }
INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE Vec load(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
INLINE Vec load(const i8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
INLINE Vec load_half(const u16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
INLINE void store(bf16* p, Vec x) {
  // By integer arithmetic and not vcvtneps2bf16, which flushes denormals; both variants then round alike.
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  __m512i out = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(out));
}
INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for whole n; too small becomes 0.
INLINE Vec scale2(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Lanes [low, high) of x, `other` elsewhere.
INLINE Vec keep(Vec x, int low, int high, Vec other) {
  u32 mask = (high >= 16 ? 0xffffu : (1u << (high < 0 ? 0 : high)) - 1) & ~(low >= 16 ? 0xffffu : (1u << (low < 0 ? 0 : low)) - 1);
  return {_mm512_mask_mov_ps(other.v, __mmask16(mask), x.v)};
}
// a < b ? x : y, lane by lane.
INLINE Vec less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}
// a >= b ? x : 0, lane by lane; 0 where one is NaN.
INLINE Vec at_least(Vec a, Vec b, Vec x) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)}; }
// Bit i: whether that is so in lane i.
INLINE u32 lanes_at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
INLINE u32 lanes_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
// The lanes whose bit is set, one behind the other, at p, where there is room for 16; returns how many.
INLINE i64 store_packed(float* p, Vec x, u32 lanes) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(lanes), x.v));
  return __builtin_popcount(lanes);
}
INLINE __m256 low_half(Vec x) { return _mm512_castps512_ps256(x.v); }
INLINE __m256 high_half(Vec x) { return _mm512_extractf32x8_ps(x.v, 1); }

// Sixteen int32 lanes; their load and store take the address of what 64 bytes there are for.
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
INLINE Vec load_half(const u16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
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
INLINE void store(bf16* p, Vec x) {
  __m256i packed = _mm256_packus_epi32(narrow(x.l), narrow(x.h));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.l, b.l), _mm256_add_ps(a.h, b.h)}; }
INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.l, b.l), _mm256_sub_ps(a.h, b.h)}; }
INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.l, b.l), _mm256_mul_ps(a.h, b.h)}; }
INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.l, b.l), _mm256_div_ps(a.h, b.h)}; }
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
INLINE Vec less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.l, x.l, _mm256_cmp_ps(a.l, b.l, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.h, x.h, _mm256_cmp_ps(a.h, b.h, _CMP_LT_OQ))};
}
INLINE Vec at_least(Vec a, Vec b, Vec x) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.l, b.l, _CMP_GE_OQ), x.l), _mm256_and_ps(_mm256_cmp_ps(a.h, b.h, _CMP_GE_OQ), x.h)};
}
INLINE u32 lanes_of(__m256 l, __m256 h) { return u32(_mm256_movemask_ps(l)) | u32(_mm256_movemask_ps(h)) << 8; }
INLINE u32 lanes_at_least(Vec a, Vec b) {
  return lanes_of(_mm256_cmp_ps(a.l, b.l, _CMP_GE_OQ), _mm256_cmp_ps(a.h, b.h, _CMP_GE_OQ));
}
INLINE u32 lanes_less(Vec a, Vec b) {
  return lanes_of(_mm256_cmp_ps(a.l, b.l, _CMP_LT_OQ), _mm256_cmp_ps(a.h, b.h, _CMP_LT_OQ));
}
// Of eight lanes, those whose bit is set in front: their numbers, a byte each.
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

// Sum and maximum over the lanes, always as ((0+8)+(4+12)) + … by halves.
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

// Sixteen sums in double, of the lanes of what is added.
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
  return {_mm256_add_pd(sums.a, wide(_mm256_castps256_ps128(x.l))), _mm256_add_pd(sums.b, wide(_mm256_extractf128_ps(x.l, 1))),
          _mm256_add_pd(sums.c, wide(_mm256_castps256_ps128(x.h))), _mm256_add_pd(sums.d, wide(_mm256_extractf128_ps(x.h, 1)))};
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

// Tails: the first n lanes; the others read as zero and are not written.
template <class T>
INLINE Vec load(const T* p, i64 n) {
  if (n >= LANES) return load(p);
  T lanes[LANES] = {};
  memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}
template <class T>
INLINE void store(T* p, Vec x, i64 n) {
  if (n >= LANES) return store(p, x);
  T lanes[LANES];
  store(lanes, x);
  memcpy(p, lanes, n * sizeof(T));
}
INLINE Vec rounded_to(const float*, Vec x) { return x; }
INLINE Vec rounded_to(const bf16*, Vec x) {
  bf16 lanes[LANES];
  store(lanes, x);
  return load(lanes);
}
template <class T>
INLINE Vec rounded(Vec x) {
  return rounded_to(static_cast<const T*>(nullptr), x);
}

// e^x within about 1 ulp; 0 below -104, inf above 88.8; NaN stays (min and max return their second operand for it).
// exp(0) is exactly 1.
INLINE Vec exp(Vec x) {
  x = max(set1(-105.0f), min(set1(89.0f), x));
  Vec n = nearest(mul(x, set1(1.44269504088896341f)));
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return scale2(p, n);
}
INLINE float exp(float x) { return first(exp(set1(x))); }
INLINE Vec silu(Vec x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
// tanh for the softcap: absolute error about 1e-7.
INLINE Vec tanh(Vec x) {
  return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
}

INLINE Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
INLINE Vec absolute(Vec x) { return max(x, sub(zero(), x)); }
// erf within 1.5e-7. Source: Abramowitz and Stegun, 7.1.26.
INLINE Vec erf(Vec x) {
  Vec a = absolute(x), t = div(set1(1.0f), fma(a, set1(0.3275911f), set1(1.0f)));
  Vec p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  Vec y = sub(set1(1.0f), mul(mul(p, t), exp(sub(zero(), mul(a, a)))));
  return less(x, zero(), sub(zero(), y), y);
}
INLINE Vec gelu(Vec x) { return mul(mul(x, set1(0.5f)), add(set1(1.0f), erf(mul(x, set1(0.70710678118654752f))))); }
INLINE Vec gelu_tanh(Vec x) {
  Vec inner = mul(set1(0.79788456080286536f), fma(mul(mul(x, x), x), set1(0.044715f), x));
  return mul(mul(x, set1(0.5f)), add(set1(1.0f), tanh(inner)));
}
// f of every lane, for what is too rare for a vector form.
template <class F>
INLINE Vec each_lane(Vec x, F f) {
  float lanes[LANES];
  store(lanes, x);
  for (float& lane : lanes) lane = f(lane);
  return load(lanes);
}
INLINE Vec log_each(Vec x) { return each_lane(x, [](float lane) { return logf(lane); }); }
INLINE Vec floor_each(Vec x) { return each_lane(x, [](float lane) { return floorf(lane); }); }
INLINE Vec sqrt_each(Vec x) { return each_lane(x, [](float lane) { return sqrtf(lane); }); }
INLINE Vec rsqrt_each(Vec x) { return div(set1(1.0f), sqrt_each(x)); }

// Byte J of each lane, which is a float exactly and a bf16 too.
template <int J>
INLINE Vec byte_of(IVec line) {
  if constexpr (J < 3) line = left_by<24 - 8 * J>(line);
  return to_float(right_by<24>(line));
}
#ifdef __AVX512VBMI__
// The two bytes of each bf16 from 0 to 127.
struct Bf16Bytes {
  alignas(64) u8 low[128], high[128];
  constexpr Bf16Bytes() : low(), high() {
    for (int value = 1; value < 128; ++value) {
      int exponent = 6;
      while (!(value >> exponent)) --exponent;
      const int bits = (127 + exponent) << 7 | ((value << (7 - exponent)) & 127);
      low[value] = u8(bits & 255);
      high[value] = u8(bits >> 8);
    }
  }
};
inline constexpr Bf16Bytes BF16_BYTES;

// The four bytes of each lane, none of which is -128, as pairs of bf16: looked up, which is half the work of computing.
INLINE void pairs_of(IVec line, IVec& first, IVec& second) {
  const __m512i size = _mm512_abs_epi8(line.v);
  __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(BF16_BYTES.low), size, _mm512_load_si512(BF16_BYTES.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(BF16_BYTES.high), size, _mm512_load_si512(BF16_BYTES.high + 64));
  high = _mm512_ternarylogic_epi32(high, line.v, _mm512_set1_epi8(-128), 0xf8);  // the sign
  const __m512 a = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)), b = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  first.v = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
  second.v = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
}
#else
// The four bytes of each lane as pairs of bf16.
INLINE void pairs_of(IVec line, IVec& first, IVec& second) {
  first = bits_or(zeros_right_by<16>(bits_of(byte_of<0>(line))), bits_of(byte_of<1>(line)));
  second = bits_or(zeros_right_by<16>(bits_of(byte_of<2>(line))), bits_of(byte_of<3>(line)));
}
#endif

// Two rows of bf16, or of int8 as bf16, as the pairs of a line.
INLINE IVec line_of(const i8* first, const i8* second) {
  return bits_or(zeros_right_by<16>(bits_of(load(first))), bits_of(load(second)));
}
#ifdef __AVX512F__
INLINE IVec line_of(const bf16* first, const bf16* second) {
  auto wide = [](const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); };
  return {_mm512_or_si512(wide(first), _mm512_slli_epi32(wide(second), 16))};
}
#else
INLINE IVec line_of(const bf16* first, const bf16* second) {
  return bits_or(zeros_right_by<16>(bits_of(load(first))), bits_of(load(second)));
}
#endif

// One k step of a dot product of 16 outputs with one row: `unit` elements of k, weights as [16][unit] in memory.
// A sum starts at what `start` gives, from memory unless `fresh`; offset(row, k) is what that needs to know of the row.
template <class T>
struct Dot;

struct FloatSums {
  using Sum = Vec;
  template <class T>
  static INLINE int offset(const T*, i64) { return 0; }
  static INLINE Vec start(int, const float* sums, bool fresh) { return fresh ? zero() : load(sums); }
  static INLINE Vec sum(const float* sums) { return load(sums); }
};

template <>
struct Dot<float> : FloatSums {
  static constexpr int unit = 1;
  using A = Vec;
  using B = Vec;
  static INLINE A left(const float* p) { return set1(*p); }
  static INLINE A left_tail(const float* p, i64) { return left(p); }
  static INLINE B right(const float* p) { return load(p); }
  template <class S>  // from its `unit` rows
  static INLINE B right(const S* const* rows, i64 at) { return load(rows[0] + at); }
  static INLINE void put(float* line, B b) { store(line, b); }
  static INLINE Vec step(Vec acc, A a, B b) { return fma(a, b, acc); }
  // The same with k step S of an int8 line, [16][4].
  template <int S>
  static INLINE Vec int8_step(Vec acc, A a, IVec line) { return step(acc, a, byte_of<S>(line)); }
};

INLINE u32 pair(const bf16* p) {
  u32 bits;
  memcpy(&bits, p, 4);
  return bits;
}

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> : FloatSums {
  static constexpr int unit = 2;
  using A = __m512i;
  using B = __m512i;
  static INLINE A left(const bf16* p) { return _mm512_set1_epi32(int(pair(p))); }
  static INLINE A left_tail(const bf16* p, i64) { return _mm512_set1_epi32(int(p->bits)); }
  static INLINE B right(const bf16* p) { return _mm512_loadu_si512(p); }
  template <class S>
  static INLINE B right(const S* const* rows, i64 at) { return line_of(rows[0] + at, rows[1] + at).v; }
  static INLINE void put(bf16* line, B b) { _mm512_storeu_si512(line, b); }
  static INLINE Vec step(Vec acc, A a, B b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)b, (__m512bh)a)}; }
  template <int S>
  static INLINE Vec int8_step(Vec acc, A a, IVec line) {
    IVec pairs[2];
    pairs_of(line, pairs[0], pairs[1]);
    return step(acc, a, pairs[S].v);
  }
};
#else
template <>
struct Dot<bf16> : FloatSums {
  static constexpr int unit = 2;
  struct A {
    __m256 even, odd;
  };
  struct B {
    __m256i l, h;
  };
  static INLINE A split(u32 bits) {
    return {_mm256_castsi256_ps(_mm256_set1_epi32(int(bits << 16))),
            _mm256_castsi256_ps(_mm256_set1_epi32(int(bits & 0xffff0000u)))};
  }
  static INLINE A left(const bf16* p) { return split(pair(p)); }
  static INLINE A left_tail(const bf16* p, i64) { return split(p->bits); }
  static INLINE B right(const bf16* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  template <class S>
  static INLINE B right(const S* const* rows, i64 at) {
    const IVec line = line_of(rows[0] + at, rows[1] + at);
    return {line.l, line.h};
  }
  static INLINE void put(bf16* line, B b) { store(static_cast<void*>(line), IVec{b.l, b.h}); }
  static INLINE __m256 half(__m256 acc, const A& a, __m256i b) {
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(int(0xffff0000u))));
    return _mm256_fmadd_ps(a.odd, odd, _mm256_fmadd_ps(a.even, even, acc));
  }
  static INLINE Vec step(Vec acc, const A& a, const B& b) { return {half(acc.l, a, b.l), half(acc.h, a, b.h)}; }
  template <int S>
  static INLINE Vec int8_step(Vec acc, const A& a, IVec line) {
    return fma({a.odd, a.odd}, byte_of<2 * S + 1>(line), fma({a.even, a.even}, byte_of<2 * S>(line), acc));
  }
};
#endif

INLINE i32 four(const i8* p, i64 count = 4) {  // the first `count` of four bytes, then zeros
  i32 bytes = 0;
  memcpy(&bytes, p, size_t(count));
  return bytes;
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

// Sums of int8 are exact in int32, in any order.
template <>
struct Dot<i8> {
  static constexpr int unit = 4;
  using Sum = IVec;
  static INLINE IVec sum(const float* sums) { return iload(sums); }
#ifdef __AVX512VNNI__
  // vpdpbusd takes its first factor without a sign: it gets the weight plus 128 (its top bit flipped), and each sum
  // starts 128 times the row's own sum too low.
  using A = __m512i;
  using B = __m512i;
  static INLINE i32 offset(const i8* row, i64 k) { return -128 * byte_sum(row, k); }
  static INLINE IVec start(i32 offset, const float* sums, bool fresh) {
    return fresh ? iset1(offset) : add(iload(sums), iset1(offset));
  }
  static INLINE A left(const i8* p) { return _mm512_set1_epi32(four(p)); }
  static INLINE A left_tail(const i8* p, i64 count) { return _mm512_set1_epi32(four(p, count)); }
  static INLINE B right(const i8* p) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128)); }
  static INLINE IVec step(IVec acc, A a, B b) { return {_mm512_dpbusd_epi32(acc.v, b, a)}; }
#else
  // vpmaddubsw saturates, so bytes are widened to 16 bits: those at even and those at odd k, two to a lane.
  struct A {
    __m256i even, odd;
  };
  struct B {
    __m256i l, h;
  };
  static INLINE int offset(const i8*, i64) { return 0; }
  static INLINE IVec start(int, const float* sums, bool fresh) { return fresh ? iset1(0) : iload(sums); }
  static INLINE __m256i even(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
  static INLINE __m256i odd(__m256i x) { return _mm256_srai_epi16(x, 8); }
  static INLINE A split(i32 bytes) { return {even(_mm256_set1_epi32(bytes)), odd(_mm256_set1_epi32(bytes))}; }
  static INLINE A left(const i8* p) { return split(four(p)); }
  static INLINE A left_tail(const i8* p, i64 count) { return split(four(p, count)); }
  static INLINE B right(const i8* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  static INLINE __m256i half(__m256i acc, const A& a, __m256i b) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a.even, even(b)));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(a.odd, odd(b)));
  }
  static INLINE IVec step(IVec acc, const A& a, const B& b) { return {half(acc.l, a, b.l), half(acc.h, a, b.h)}; }
#endif
};

// A line of int8 weights, [16][4], as the lines [16][unit] that the same four k take in T.
INLINE void widen_line(const i8* line, float* out) {
  IVec bytes = iload(line);
  store(out, byte_of<0>(bytes));
  store(out + 16, byte_of<1>(bytes));
  store(out + 32, byte_of<2>(bytes));
  store(out + 48, byte_of<3>(bytes));
}
INLINE void widen_line(const i8* line, bf16* out) {
  IVec first, second;
  pairs_of(iload(line), first, second);
  store(static_cast<void*>(out), first);
  store(static_cast<void*>(out + 32), second);
}


}  // namespace inferc
