// Quantization of rows to int8 with a scale each, alone or at the end of another kernel.
#pragma once
#include "rows.h"

namespace inferc {

// Divisions by one number with correctly rounded results: each is a product and two corrections, the last one exact.
// Source: Markstein 1990, IBM Journal of Research and Development 34(1).
struct Divisor {
  Vec by, inverse, minus;
  bool is_plain;  // the divisor is too small or too large for that, so a division is used
  INLINE explicit Divisor(float x)
      : by(set1(x)), inverse(set1(1.0f / x)), minus(set1(-x)), is_plain(!(x > 0x1p-100f && x < 0x1p100f)) {}
  INLINE Vec corrected(Vec quotient, Vec x) const { return fma(fma(quotient, minus, x), inverse, quotient); }
  INLINE Vec of(Vec x) const { return is_plain ? div(x, by) : corrected(corrected(mul(x, inverse), x), x); }
};

// Writes a row as int8 and its scale.
template <class T>
INLINE void quantize_row(const T* row, i64 width, i8* out, float* scale) {
  Vec top = zero(), broken = zero();
  each_vector(width, [&](i64 i, auto n) {
    const Vec v = load(row + i, n);
    top = max(top, absolute(v));
    broken = add(broken, sub(v, v));  // 0, or NaN after any NaN or infinity, which a maximum may lose
  });
  float step = maximum(top) / 127.0f + sum(broken);
  *scale = step == 0.0f ? 1.0f : step;
  const Divisor divisor(*scale);
  each_vector(width, [&](i64 i, auto n) {
    Vec whole = max(min(nearest(divisor.of(load(row + i, n))), set1(127.0f)), set1(-127.0f));
    store(out + i, whole, n);
  });
}

// Quantizes value_of(i, n), which gives n elements from i on in float32; these are rounded to T first.
template <class T, class F>
__attribute__((noinline)) void quantize_values(i64 width, F value_of, i8* out, float* scale) {
  T* kept = static_cast<T*>(__builtin_alloca(size_t(width) * sizeof(T)));
  each_vector(width, [&](i64 i, auto n) { store(kept + i, value_of(i, n), n); });
  quantize_row(kept, width, out, scale);
}

template <class T>
KERNEL void quantize_rows(Team& team, Rows<const T> x, i64 rows, i64 width, Rows<i8> out, Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      quantize_row(x[row], width, out[row], scale[row]);
  });
}

// Not inlined, so that its stack is released after every row.
template <class T>
__attribute__((noinline)) void quantize_normed(const T* x, const T* weight, const Norm& norm, i64 width, i8* out,
                                               float* scale) {
  T* kept = static_cast<T*>(__builtin_alloca(size_t(width) * sizeof(T)));
  norm_row(x, weight, norm, width, kept);
  quantize_row(kept, width, out, scale);
}

template <class T>
KERNEL void rms_norm_quantize(Team& team, Rows<const T> x, const T* weight, Norm norm, i64 rows, i64 width,
                              Rows<i8> out, Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      quantize_normed(x[row], weight, norm, width, out[row], scale[row]);
  });
}

// Computes total = x + residual, rounded, and quantizes its norm. `total` may be the same memory as `residual` or `x`.
template <class T>
KERNEL void rms_norm_add_quantize(Team& team, Rows<const T> x, Rows<const T> residual, const T* weight, Norm norm,
                                  i64 rows, i64 width, Rows<i8> out, Rows<float> scale, Rows<T> total) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      add_row(x[row], residual[row], width, total[row]);
      quantize_normed<T>(total[row], weight, norm, width, out[row], scale[row]);
    }
  });
}

template <class T>
KERNEL void layer_norm_quantize(Team& team, Rows<const T> x, const T* weight, const T* bias, float eps, i64 rows,
                                i64 width, Rows<i8> out, Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      quantize_values<T>(width, LayerNormedRow<T>(x[row], weight, bias, eps, width), out[row], scale[row]);
  });
}

template <class T>
KERNEL void silu_mul_quantize(Team& team, Rows<const T> gate, Rows<const T> up, i64 rows, i64 width, Rows<i8> out,
                              Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      auto value = [&](i64 i, auto n) { return mul(silu(load(gate[row] + i, n)), load(up[row] + i, n)); };
      quantize_values<T>(width, value, out[row], scale[row]);
    }
  });
}

}  // namespace inferc
