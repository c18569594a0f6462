// Vectors of sixteen float32 lanes with the same functions on every instruction set. The functions that need its own
// instructions are in simd_x86.h and simd_arm.h; those made of them are here.
// Everything is an explicit instruction in a fixed order: a lane's result never depends on the other lanes.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#define INLINE inline __attribute__((always_inline))
// Kernels that generated code calls are compiled in other units, so g++ must not derive anything from a body it can
// see.
#if defined(__GNUC__) && !defined(__clang__)
#define KERNEL __attribute__((noipa))
#else
#define KERNEL
#endif

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

}  // namespace inferc

// The functions of a Vec: load, store, add … less, `keep` (lanes [low, high) of x, `other` elsewhere), `scale2` (x *
// 2^n for whole n; a result that is too small becomes 0), `sum` and `maximum` over the lanes, always as ((0+8)+(4+12))
// + … by halves. The functions of an IVec of sixteen int32: load and store take the address of any type with 64 bytes.
// Both files also have byte_sum, and relax and ticks for waiting threads.
#ifdef __aarch64__
#include "simd_arm.h"
#else
#include "simd_x86.h"
#endif

namespace inferc {

// Prefetches the line at p into the first-level cache, or into the second.
INLINE void fetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
INLINE void fetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
// Reads a byte of every page of [p, p + bytes). A prefetch does nothing for a page whose address the processor has not
// translated yet, which a load makes it do (measured in a virtual machine, where it translates 4 KB at a time).
INLINE void touch_pages(const void* p, i64 bytes) {
  const auto* at = static_cast<const volatile u8*>(p);
  for (i64 page = 0; page < bytes; page += 4096) (void)at[page];
}

// Loads and stores of the first n lanes; the other lanes read as zero and are not written.
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
// Calls f(i, n) for every vector of `width` elements; n is the number of its elements, LANES as a constant but for the
// last.
template <class F>
INLINE void each_vector(i64 width, F f) {
  i64 i = 0;
  for (; i + LANES <= width; i += LANES) f(i, std::integral_constant<i64, LANES>());
  if (i < width) f(i, width - i);
}
// Conversion of values without denormals, which some conversion instructions do not handle.
INLINE void store_normal(float* p, Vec x) { store(p, x); }
#ifndef __AVX512F__
INLINE void store_normal(bf16* p, Vec x) { store(p, x); }
#endif
INLINE Vec rounded_to(const float*, Vec x) { return x; }
#ifdef __AVX512F__
INLINE Vec rounded_to(const bf16*, Vec x) { return widened(narrow(x)); }
#else
INLINE Vec rounded_to(const bf16*, Vec x) {
  bf16 lanes[LANES];
  store(lanes, x);
  return load(lanes);
}
#endif
template <class T>
INLINE Vec rounded(Vec x) {
  return rounded_to(static_cast<const T*>(nullptr), x);
}

// e^x within about 1 ulp; 0 below -87.3, where it would be denormal (which is slow on some processors, and a masked
// score is -inf); inf above 88.8; NaN stays (min and max return their second operand for it). exp(0) is
// exactly 1.
INLINE Vec exp(Vec power) {
  const Vec least = set1(-87.3f);
  Vec x = max(least, min(set1(89.0f), power));
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
  return less(power, least, zero(), scale2(p, n));
}
INLINE float exp(float x) { return first(exp(set1(x))); }
INLINE Vec silu(Vec x) { return near_div(x, min(add(set1(1.0f), exp(sub(zero(), x))), set1(0x1p126f))); }
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
// Applies f to every lane, for functions that are too rare for a vector form.
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

// Byte J of each lane as float; float and bf16 hold it exactly.
template <int J>
INLINE Vec byte_of(IVec line) {
  if constexpr (J < 3) line = left_by<24 - 8 * J>(line);
  return to_float(right_by<24>(line));
}

}  // namespace inferc
