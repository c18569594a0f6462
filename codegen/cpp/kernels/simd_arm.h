// The vectors of simd.h as four NEON registers, and other instructions of AArch64.
// Values of any type are loaded and stored as bytes; the other loads and stores are of the type that they name.
#pragma once
#include <arm_neon.h>

// Applies f to the four registers of each argument.
#define INFERC_FOUR(f, a) {{f(a.q[0]), f(a.q[1]), f(a.q[2]), f(a.q[3])}}
#define INFERC_FOUR_2(f, a, b) {{f(a.q[0], b.q[0]), f(a.q[1], b.q[1]), f(a.q[2], b.q[2]), f(a.q[3], b.q[3])}}

namespace inferc {

struct Vec {
  float32x4_t q[4];
};
INLINE Vec set1(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {{all, all, all, all}};
}
INLINE Vec zero() { return set1(0.0f); }
INLINE Vec load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
INLINE float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
INLINE Vec load(const bf16* p) {
  const uint16x8_t l = vld1q_u16(&p->bits), h = vld1q_u16(&p->bits + 8);
  return {{widen(vget_low_u16(l)), widen(vget_high_u16(l)), widen(vget_low_u16(h)), widen(vget_high_u16(h))}};
}
INLINE float32x4_t whole_floats(int16x4_t x) { return vcvtq_f32_s32(vmovl_s16(x)); }
INLINE Vec load(const i8* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t l = vmovl_s8(vget_low_s8(bytes)), h = vmovl_high_s8(bytes);
  return {{whole_floats(vget_low_s16(l)), whole_floats(vget_high_s16(l)), whole_floats(vget_low_s16(h)),
           whole_floats(vget_high_s16(h))}};
}
INLINE void store(float* p, Vec x) {
  vst1q_f32(p, x.q[0]);
  vst1q_f32(p + 4, x.q[1]);
  vst1q_f32(p + 8, x.q[2]);
  vst1q_f32(p + 12, x.q[3]);
}
INLINE uint16x4_t narrow(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), top = vshrq_n_u32(bits, 16);
  const uint32x4_t up = vaddq_u32(vandq_u32(top, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
  const uint32x4_t near = vshrq_n_u32(vaddq_u32(bits, up), 16), quiet = vorrq_u32(top, vdupq_n_u32(0x40));
  return vmovn_u32(vbslq_u32(vceqq_f32(x, x), near, quiet));
}
INLINE void store(bf16* p, Vec x) {
  vst1q_u16(&p->bits, vcombine_u16(narrow(x.q[0]), narrow(x.q[1])));
  vst1q_u16(&p->bits + 8, vcombine_u16(narrow(x.q[2]), narrow(x.q[3])));
}
INLINE Vec add(Vec a, Vec b) { return INFERC_FOUR_2(vaddq_f32, a, b); }
INLINE Vec sub(Vec a, Vec b) { return INFERC_FOUR_2(vsubq_f32, a, b); }
INLINE Vec mul(Vec a, Vec b) { return INFERC_FOUR_2(vmulq_f32, a, b); }
INLINE Vec div(Vec a, Vec b) { return INFERC_FOUR_2(vdivq_f32, a, b); }
INLINE Vec near_div(Vec a, Vec b) { return div(a, b); }
INLINE float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {{fma(a.q[0], b.q[0], c.q[0]), fma(a.q[1], b.q[1], c.q[1]), fma(a.q[2], b.q[2], c.q[2]),
           fma(a.q[3], b.q[3], c.q[3])}};
}
// By comparison, so that the result is b if either is NaN, as on x86; fmax would give NaN, fmaxnm a.
INLINE float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE Vec max(Vec a, Vec b) { return INFERC_FOUR_2(max, a, b); }
INLINE Vec min(Vec a, Vec b) { return INFERC_FOUR_2(min, a, b); }
INLINE Vec nearest(Vec a) { return INFERC_FOUR(vrndnq_f32, a); }
INLINE float32x4_t power2(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
// x * 2^n in two steps, so that n = 128 and denormal results work.
INLINE float32x4_t scale2(float32x4_t x, float32x4_t n) {
  const float32x4_t half = vrndmq_f32(vmulq_n_f32(n, 0.5f));
  return vmulq_f32(vmulq_f32(x, power2(half)), power2(vsubq_f32(n, half)));
}
INLINE Vec scale2(Vec x, Vec n) { return INFERC_FOUR_2(scale2, x, n); }
INLINE float32x4_t keep(float32x4_t x, int low, int high, float32x4_t other) {
  const int32x4_t lane = {0, 1, 2, 3};
  return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(low)), vcltq_s32(lane, vdupq_n_s32(high))), x, other);
}
INLINE Vec keep(Vec x, int low, int high, Vec other) {
  return {{keep(x.q[0], low, high, other.q[0]), keep(x.q[1], low - 4, high - 4, other.q[1]),
           keep(x.q[2], low - 8, high - 8, other.q[2]), keep(x.q[3], low - 12, high - 12, other.q[3])}};
}
INLINE float32x4_t only(float32x4_t x, u32 lanes, float32x4_t other) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(lanes), bits), x, other);
}
INLINE Vec only(Vec x, u32 lanes, Vec other) {
  return {{only(x.q[0], lanes, other.q[0]), only(x.q[1], lanes >> 4, other.q[1]), only(x.q[2], lanes >> 8, other.q[2]),
           only(x.q[3], lanes >> 12, other.q[3])}};
}
INLINE float32x4_t less(float32x4_t a, float32x4_t b, float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcltq_f32(a, b), x, y);
}
INLINE Vec less(Vec a, Vec b, Vec x, Vec y) {
  return {{less(a.q[0], b.q[0], x.q[0], y.q[0]), less(a.q[1], b.q[1], x.q[1], y.q[1]),
           less(a.q[2], b.q[2], x.q[2], y.q[2]), less(a.q[3], b.q[3], x.q[3], y.q[3])}};
}

INLINE float32x4_t at_least(float32x4_t a, float32x4_t b, float32x4_t x) {
  return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a, b), vreinterpretq_u32_f32(x)));
}
INLINE Vec at_least(Vec a, Vec b, Vec x) {
  return {{at_least(a.q[0], b.q[0], x.q[0]), at_least(a.q[1], b.q[1], x.q[1]), at_least(a.q[2], b.q[2], x.q[2]),
           at_least(a.q[3], b.q[3], x.q[3])}};
}
INLINE u32 lanes_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint16x8_t l = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), h = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
  const uint8x8_t bits = {1, 2, 4, 8, 16, 32, 64, 128};
  return u32(vaddv_u8(vand_u8(vmovn_u16(l), bits))) | u32(vaddv_u8(vand_u8(vmovn_u16(h), bits))) << 8;
}
INLINE u32 lanes_at_least(Vec a, Vec b) {
  return lanes_of(vcgeq_f32(a.q[0], b.q[0]), vcgeq_f32(a.q[1], b.q[1]), vcgeq_f32(a.q[2], b.q[2]),
                  vcgeq_f32(a.q[3], b.q[3]));
}
INLINE u32 lanes_less(Vec a, Vec b) {
  return lanes_of(vcltq_f32(a.q[0], b.q[0]), vcltq_f32(a.q[1], b.q[1]), vcltq_f32(a.q[2], b.q[2]),
                  vcltq_f32(a.q[3], b.q[3]));
}
// For each mask of four lanes, the numbers of the bytes of the lanes whose bit is set, first in the line.
struct PackOrders {
  u8 of[16][16];
  constexpr PackOrders() : of() {
    for (int lanes = 0; lanes < 16; ++lanes)
      for (int lane = 0, count = 0; lane < 4; ++lane)
        if (lanes >> lane & 1)
          for (int byte = 0; byte < 4; ++byte) of[lanes][count++] = u8(4 * lane + byte);
  }
};
inline constexpr PackOrders PACK_ORDERS;

INLINE i64 store_packed(float* p, float32x4_t x, u32 lanes) {
  vst1q_f32(p, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(x), vld1q_u8(PACK_ORDERS.of[lanes]))));
  return __builtin_popcount(lanes);
}
INLINE i64 store_packed(float* p, Vec x, u32 lanes) {
  i64 count = store_packed(p, x.q[0], lanes & 15);
  count += store_packed(p + count, x.q[1], lanes >> 4 & 15);
  count += store_packed(p + count, x.q[2], lanes >> 8 & 15);
  return count + store_packed(p + count, x.q[3], lanes >> 12 & 15);
}

struct IVec {
  int32x4_t q[4];
};
INLINE int32x4_t load_four(const void* p, int i) {
  return vreinterpretq_s32_u8(vld1q_u8(static_cast<const u8*>(p) + 16 * i));
}
INLINE IVec iset1(i32 x) {
  const int32x4_t all = vdupq_n_s32(x);
  return {{all, all, all, all}};
}
INLINE IVec iload(const void* p) { return {{load_four(p, 0), load_four(p, 1), load_four(p, 2), load_four(p, 3)}}; }
INLINE void store_four(void* p, int i, int32x4_t x) { vst1q_u8(static_cast<u8*>(p) + 16 * i, vreinterpretq_u8_s32(x)); }
INLINE void store(void* p, IVec x) {
  store_four(p, 0, x.q[0]);
  store_four(p, 1, x.q[1]);
  store_four(p, 2, x.q[2]);
  store_four(p, 3, x.q[3]);
}
INLINE IVec add(IVec a, IVec b) { return INFERC_FOUR_2(vaddq_s32, a, b); }
INLINE IVec bits_or(IVec a, IVec b) { return INFERC_FOUR_2(vorrq_s32, a, b); }
template <int N>
INLINE IVec left_by(IVec a) {
  return {{vshlq_n_s32(a.q[0], N), vshlq_n_s32(a.q[1], N), vshlq_n_s32(a.q[2], N), vshlq_n_s32(a.q[3], N)}};
}
template <int N>
INLINE IVec right_by(IVec a) {
  return {{vshrq_n_s32(a.q[0], N), vshrq_n_s32(a.q[1], N), vshrq_n_s32(a.q[2], N), vshrq_n_s32(a.q[3], N)}};
}
template <int N>
INLINE int32x4_t zeros_right_by(int32x4_t a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), N)); }
template <int N>
INLINE IVec zeros_right_by(IVec a) { return INFERC_FOUR(zeros_right_by<N>, a); }
INLINE bool any(IVec a) {
  return vmaxvq_u32(vreinterpretq_u32_s32(vorrq_s32(vorrq_s32(a.q[0], a.q[1]), vorrq_s32(a.q[2], a.q[3])))) != 0;
}
INLINE Vec to_float(IVec a) { return INFERC_FOUR(vcvtq_f32_s32, a); }
INLINE IVec bits_of(Vec a) { return INFERC_FOUR(vreinterpretq_s32_f32, a); }
INLINE int16x8_t whole(float32x4_t l, float32x4_t h) {
  return vcombine_s16(vmovn_s32(vcvtnq_s32_f32(l)), vmovn_s32(vcvtnq_s32_f32(h)));
}
INLINE void store(i8* p, Vec x) {
  vst1q_s8(p, vcombine_s8(vmovn_s16(whole(x.q[0], x.q[1])), vmovn_s16(whole(x.q[2], x.q[3]))));
}

INLINE float sum(Vec x) {
  const float32x4_t a = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
INLINE float maximum(Vec x) {
  float32x4_t a = max(max(x.q[0], x.q[2]), max(x.q[1], x.q[3]));
  a = max(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(max(a, vdupq_laneq_f32(a, 1)), 0);
}
INLINE float first(Vec x) { return vgetq_lane_f32(x.q[0], 0); }

struct Wide {
  float64x2_t q[8];
};
INLINE float64x2_t add_low(float64x2_t sum, float32x4_t x) { return vaddq_f64(sum, vcvt_f64_f32(vget_low_f32(x))); }
INLINE float64x2_t add_high(float64x2_t sum, float32x4_t x) { return vaddq_f64(sum, vcvt_high_f64_f32(x)); }
INLINE Wide add(Wide sums, Vec x) {
  return {{add_low(sums.q[0], x.q[0]), add_high(sums.q[1], x.q[0]), add_low(sums.q[2], x.q[1]),
           add_high(sums.q[3], x.q[1]), add_low(sums.q[4], x.q[2]), add_high(sums.q[5], x.q[2]),
           add_low(sums.q[6], x.q[3]), add_high(sums.q[7], x.q[3])}};
}
INLINE double sum(Wide x) {
  const float64x2_t a = vaddq_f64(x.q[0], x.q[4]), b = vaddq_f64(x.q[1], x.q[5]);
  const float64x2_t c = vaddq_f64(x.q[2], x.q[6]), d = vaddq_f64(x.q[3], x.q[7]);
  const float64x2_t both = vaddq_f64(vaddq_f64(a, c), vaddq_f64(b, d));
  return vgetq_lane_f64(both, 0) + vgetq_lane_f64(both, 1);
}

INLINE i32 byte_sum(const i8* p, i64 count) {
  int32x4_t total = vdupq_n_s32(0);
  for (; count >= 16; count -= 16, p += 16) total = vdotq_s32(total, vld1q_s8(p), vdupq_n_s8(1));
  i32 sum = vaddvq_s32(total);
  for (i64 i = 0; i < count; ++i) sum += p[i];
  return sum;
}

// Pauses a waiting loop: isb delays the thread by some cycles, while yield usually does nothing.
INLINE void relax() { asm volatile("isb" ::: "memory"); }

// A clock that takes a few cycles to read, and its ticks in a given number of cycles of a processor of 3 GHz.
INLINE u64 ticks() {
  u64 now;
  asm volatile("mrs\t%0, cntvct_el0" : "=r"(now));
  return now;
}
INLINE u64 ticks_of(u64 cycles) {
  u64 per_second;
  asm volatile("mrs\t%0, cntfrq_el0" : "=r"(per_second));
  return cycles * per_second / 3'000'000'000;
}

}  // namespace inferc
