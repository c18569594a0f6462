// Rows as int8 with a scale each, alone or as the end of what makes them.
#pragma once
#include "rows.h"

namespace inferc {

// value_of(i): the elements from i on, in float32, rounded to T here; called twice for each.
template <class T, class F>
INLINE void quantize_row(i64 width, F value_of, i8* out, float* scale) {
  auto value = [&](i64 i) { return keep(rounded<T>(value_of(i)), 0, int(width - i < 16 ? width - i : 16), zero()); };
  Vec top = zero(), broken = zero();
  for (i64 i = 0; i < width; i += LANES) {
    Vec v = value(i);
    top = max(top, absolute(v));
    broken = add(broken, sub(v, v));  // 0, or NaN if anything is NaN or infinite, which a maximum may lose
  }
  float step = maximum(top) / 127.0f + sum(broken);
  *scale = step == 0.0f ? 1.0f : step;
  const Vec by = set1(*scale);
  for (i64 i = 0; i < width; i += LANES) {
    Vec whole = max(min(nearest(div(value(i), by)), set1(127.0f)), set1(-127.0f));
    store(out + i, whole, width - i);
  }
}

// The same for elements that are dearer to compute than to keep.
template <class T, class F>
__attribute__((noinline)) void quantize_dear_row(i64 width, F value_of, i8* out, float* scale) {
  T* kept = static_cast<T*>(__builtin_alloca(size_t(width) * sizeof(T)));
  for (i64 i = 0; i < width; i += LANES) store(kept + i, value_of(i), width - i);
  quantize_row<T>(width, [&](i64 i) { return load(kept + i, width - i); }, out, scale);
}

template <class T>
KERNEL void quantize_rows(Team& team, Rows<const T> x, i64 rows, i64 width, Rows<i8> out, Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      quantize_row<T>(width, [&](i64 i) { return load(x[row] + i, width - i); }, out[row], scale[row]);
  });
}

template <class T>
KERNEL void rms_norm_quantize(Team& team, Rows<const T> x, const T* weight, Norm norm, i64 rows, i64 width, Rows<i8> out,
                              Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      quantize_row<T>(width, NormedRow<T>(x[row], weight, norm, width), out[row], scale[row]);
  });
}

// total = x + residual, rounded; what is quantized is its norm. total may be where residual or x is.
template <class T>
KERNEL void rms_norm_add_quantize(Team& team, Rows<const T> x, Rows<const T> residual, const T* weight, Norm norm, i64 rows,
                                  i64 width, Rows<i8> out, Rows<float> scale, Rows<T> total) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      for (i64 i = 0; i < width; i += LANES)
        store(total[row] + i, add(load(x[row] + i, width - i), load(residual[row] + i, width - i)), width - i);
      quantize_row<T>(width, NormedRow<T>(total[row], weight, norm, width), out[row], scale[row]);
    }
  });
}

template <class T>
KERNEL void layer_norm_quantize(Team& team, Rows<const T> x, const T* weight, const T* bias, float eps, i64 rows, i64 width,
                                Rows<i8> out, Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      quantize_row<T>(width, LayerNormedRow<T>(x[row], weight, bias, eps, width), out[row], scale[row]);
  });
}

template <class T>
KERNEL void silu_mul_quantize(Team& team, Rows<const T> gate, Rows<const T> up, i64 rows, i64 width, Rows<i8> out,
                              Rows<float> scale) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      auto value = [&](i64 i) { return mul(silu(load(gate[row] + i, width - i)), load(up[row] + i, width - i)); };
      quantize_dear_row<T>(width, value, out[row], scale[row]);
    }
  });
}

}  // namespace inferc
