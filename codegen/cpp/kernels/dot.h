// The dot-product step of each storage type, on each instruction set.
#pragma once
#include "simd.h"

namespace inferc {

#ifdef __AVX512VBMI__
// The two bytes of bf16 for each number from 0 to 127.
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

// Widens the four bytes of each lane, none of which is -128, to pairs of bf16 by look-up, at half the cost of
// arithmetic.
INLINE void pairs_of(IVec line, IVec& first, IVec& second) {
  const __m512i size = _mm512_abs_epi8(line.v);
  __m512i low =
      _mm512_permutex2var_epi8(_mm512_load_si512(BF16_BYTES.low), size, _mm512_load_si512(BF16_BYTES.low + 64));
  __m512i high =
      _mm512_permutex2var_epi8(_mm512_load_si512(BF16_BYTES.high), size, _mm512_load_si512(BF16_BYTES.high + 64));
  high = _mm512_ternarylogic_epi32(high, line.v, _mm512_set1_epi8(-128), 0xf8);  // the sign
  const __m512 a = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)),
               b = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  first.v = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
  second.v = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
}
#else
// Widens the four bytes of each lane to pairs of bf16.
INLINE void pairs_of(IVec line, IVec& first, IVec& second) {
  first = bits_or(zeros_right_by<16>(bits_of(byte_of<0>(line))), bits_of(byte_of<1>(line)));
  second = bits_or(zeros_right_by<16>(bits_of(byte_of<2>(line))), bits_of(byte_of<3>(line)));
}
#endif

// Joins two rows of bf16, or of int8 as bf16, to the pairs of a line.
INLINE IVec line_of(const i8* first, const i8* second) {
  return bits_or(zeros_right_by<16>(bits_of(load(first))), bits_of(load(second)));
}
#if defined(__AVX512F__)
INLINE IVec line_of(const bf16* first, const bf16* second) {
  auto wide = [](const bf16* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  };
  return {_mm512_or_si512(wide(first), _mm512_slli_epi32(wide(second), 16))};
}
#elif defined(__aarch64__)
INLINE IVec line_of(const bf16* first, const bf16* second) {
  auto four = [](uint16x8_t pairs) { return vreinterpretq_s32_u16(pairs); };
  const uint16x8_t a = vld1q_u16(&first->bits), b = vld1q_u16(&second->bits);
  const uint16x8_t c = vld1q_u16(&first->bits + 8), d = vld1q_u16(&second->bits + 8);
  return {{four(vzip1q_u16(a, b)), four(vzip2q_u16(a, b)), four(vzip1q_u16(c, d)), four(vzip2q_u16(c, d))}};
}
#else
INLINE IVec line_of(const bf16* first, const bf16* second) {
  return bits_or(zeros_right_by<16>(bits_of(load(first))), bits_of(load(second)));
}
#endif

// One k step of a dot product of 16 outputs with one row: `unit` elements of k, weights as [16][unit] in memory.
// `start` gives the first value of a sum: what `sums` holds in memory, or zero if `fresh`. With HAS_OFFSET a fresh sum
// starts at offset(row, k) over all of k instead.
template <class T>
struct Dot;

struct FloatSums {
  using Sum = Vec;
  static constexpr bool HAS_OFFSET = false;
  static INLINE Vec start(i32, const float* sums, bool fresh) { return fresh ? zero() : load(sums); }
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
  template <class S>  // from the `unit` rows of a line
  static INLINE B right(const S* const* rows, i64 at) { return load(rows[0] + at); }
  static INLINE void put(float* line, B b) { store(line, b); }
  static INLINE Vec step(Vec acc, A a, B b) { return fma(a, b, acc); }
  // A k step with step S of an int8 line, [16][4].
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
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <>
struct Dot<bf16> : FloatSums {
  static constexpr int unit = 2;
  using A = bfloat16x8_t;
  using B = IVec;
  static INLINE A left(const bf16* p) { return vreinterpretq_bf16_u32(vdupq_n_u32(pair(p))); }
  static INLINE A left_tail(const bf16* p, i64) { return vreinterpretq_bf16_u32(vdupq_n_u32(p->bits)); }
  static INLINE B right(const bf16* p) { return iload(p); }
  template <class S>
  static INLINE B right(const S* const* rows, i64 at) { return line_of(rows[0] + at, rows[1] + at); }
  static INLINE void put(bf16* line, const B& b) { store(static_cast<void*>(line), b); }
  static INLINE Vec step(Vec acc, A a, const B& b) {
    auto dot = [&](float32x4_t sum, int32x4_t pairs) { return vbfdotq_f32(sum, vreinterpretq_bf16_s32(pairs), a); };
    return INFERC_FOUR_2(dot, acc, b);
  }
  template <int S>
  static INLINE Vec int8_step(Vec acc, A a, IVec line) {
    IVec pairs[2];
    pairs_of(line, pairs[0], pairs[1]);
    return step(acc, a, pairs[S]);
  }
};
#elif defined(__aarch64__)
template <>
struct Dot<bf16> : FloatSums {
  static constexpr int unit = 2;
  struct A {
    Vec even, odd;
  };
  using B = A;
  static INLINE A split(IVec pairs) {
    auto even = [](int32x4_t pair) { return vreinterpretq_f32_s32(vshlq_n_s32(pair, 16)); };
    auto odd = [](int32x4_t pair) { return vreinterpretq_f32_s32(vandq_s32(pair, vdupq_n_s32(i32(0xffff0000u)))); };
    return {INFERC_FOUR(even, pairs), INFERC_FOUR(odd, pairs)};
  }
  static INLINE A left(const bf16* p) { return split(iset1(i32(pair(p)))); }
  static INLINE A left_tail(const bf16* p, i64) { return split(iset1(p->bits)); }
  static INLINE B right(const bf16* p) { return split(iload(p)); }
  template <class S>
  static INLINE B right(const S* const* rows, i64 at) { return {load(rows[0] + at), load(rows[1] + at)}; }
  static INLINE void put(bf16* line, const B& b) {
    store(static_cast<void*>(line), bits_or(zeros_right_by<16>(bits_of(b.even)), bits_of(b.odd)));
  }
  static INLINE Vec step(Vec acc, const A& a, const B& b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }
  template <int S>
  static INLINE Vec int8_step(Vec acc, const A& a, IVec line) {
    return fma(a.odd, byte_of<2 * S + 1>(line), fma(a.even, byte_of<2 * S>(line), acc));
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

// Sums of int8 are exact in int32, in any order.
template <>
struct Dot<i8> {
  static constexpr int unit = 4;
  using Sum = IVec;
  static INLINE IVec sum(const float* sums) { return iload(sums); }
#ifdef __AVX512VNNI__
  // vpdpbusd takes its first factor as unsigned: it gets the weight plus 128 (its top bit flipped), and each sum starts
  // lower by 128 times the row's own sum.
  using A = __m512i;
  using B = __m512i;
  static constexpr bool HAS_OFFSET = true;
  static INLINE i32 offset(const i8* row, i64 k) { return -128 * byte_sum(row, k); }
  static INLINE IVec start(i32 offset, const float* sums, bool fresh) { return fresh ? iset1(offset) : iload(sums); }
  static INLINE A left(const i8* p) { return _mm512_set1_epi32(four(p)); }
  static INLINE A left_tail(const i8* p, i64 count) { return _mm512_set1_epi32(four(p, count)); }
  static INLINE B right(const i8* p) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128)); }
  static INLINE IVec step(IVec acc, A a, B b) { return {_mm512_dpbusd_epi32(acc.v, b, a)}; }
#elif defined(__aarch64__)
  using A = int8x16_t;
  using B = IVec;
  static constexpr bool HAS_OFFSET = false;
  static INLINE IVec start(i32, const float* sums, bool fresh) { return fresh ? iset1(0) : iload(sums); }
  static INLINE A left(const i8* p) { return vreinterpretq_s8_s32(vdupq_n_s32(four(p))); }
  static INLINE A left_tail(const i8* p, i64 count) { return vreinterpretq_s8_s32(vdupq_n_s32(four(p, count))); }
  static INLINE B right(const i8* p) { return iload(p); }
  static INLINE IVec step(IVec acc, A a, const B& b) {
    auto dot = [&](int32x4_t sum, int32x4_t fours) { return vdotq_s32(sum, vreinterpretq_s8_s32(fours), a); };
    return INFERC_FOUR_2(dot, acc, b);
  }
#else
  // vpmaddubsw saturates, so bytes are widened to 16 bits: those of even k and those of odd k, two in a lane.
  struct A {
    __m256i even, odd;
  };
  struct B {
    __m256i l, h;
  };
  static constexpr bool HAS_OFFSET = false;
  static INLINE IVec start(i32, const float* sums, bool fresh) { return fresh ? iset1(0) : iload(sums); }
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

// Turns a line of int8 weights, [16][4], into the lines [16][unit] of the same four k in T.
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

// Stores 16 consecutive elements to every `unit`th place of a line, from `lane` on. The other places are not written,
// since another thread may write them.
template <class T>
INLINE void spread(const T* from, T* line, i64 lane) {
  for (int i = 0; i < LANES; ++i) line[i * Dot<T>::unit + lane] = from[i];
}
INLINE void spread(const float* from, float* line, i64) { store(line, load(from)); }
#ifdef __AVX512BW__
INLINE void spread(const bf16* from, bf16* line, i64 lane) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  _mm512_mask_storeu_epi16(line, 0x55555555u << lane, _mm512_slli_epi32(wide, u32(lane) * 16));
}
INLINE void spread(const i8* from, i8* line, i64 lane) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm512_mask_storeu_epi8(line, 0x1111111111111111ull << lane, _mm512_slli_epi32(wide, u32(lane) * 8));
}
#endif

}  // namespace inferc
