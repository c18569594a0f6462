#include "units.h"

// x int8 with scales if x_scale, else in T; residual and bias may be null.
// The product in float32, as an LM head has it.
EXPORT void test_wide_int8(void* pool, i64 dtype, const void* x, const float* x_scale, i64 rows, const i8* w, i64 n, i64 k,
                           const float* scale, const void* bias, float* out) {
  FOR_DTYPE(dtype, {
    Panels<i8> panels{w, n, k};
    Written<float> written{{}, {out, n}};
    on(pool, [&](Team& t) {
      if (x_scale)
        linear_w8a8<T>(t, rows_of<const i8>(x, k), rows_of<const float>(x_scale, 1), rows, panels, scale, as<T>(bias), written);
      else linear_int8<T>(t, rows_of<const T>(x, k), rows, panels, scale, as<T>(bias), written);
    });
  })
}

// The same with a weight in T too, unless there are scales, and as `blocking` says.
EXPORT void test_blocked(void* pool, i64 dtype, const void* x, const float* x_scale, i64 rows, const void* w, i64 n, i64 k,
                         const float* scale, const Blocking* blocking, float* out) {
  FOR_DTYPE(dtype, {
    Written<float> written{{}, {out, n}};
    on(pool, [&](Team& t) {
      const Panels<i8> bytes{as<i8>(w), n, k, 0, blocking};
      if (!scale) linear<T, float>(t, rows_of<const T>(x, k), rows, Panels<T>{as<T>(w), n, k, 0, blocking}, nullptr, {out, n});
      else if (!x_scale) linear_int8<T>(t, rows_of<const T>(x, k), rows, bytes, scale, nullptr, written);
      else linear_w8a8<T>(t, rows_of<const i8>(x, k), rows_of<const float>(x_scale, 1), rows, bytes, scale, nullptr, written);
    });
  })
}

EXPORT void test_linear_w4a8(void* pool, i64 dtype, const i8* x, i64 ldx, const float* x_scale, i64 rows, const u8* w,
                             const i8* group_scale, const float* scale, i64 n, i64 k, i64 group, const void* bias,
                             const void* residual, void* out) {
  FOR_DTYPE(dtype, {
    Int4Panels panels{w, group_scale, n, k, group};
    Written<T> written{rows_of<const T>(residual, n), rows_of<T>(out, n)};
    on(pool, [&](Team& t) {
      linear_w4a8<T>(t, Rows<const i8>{x, ldx}, Rows<const float>{x_scale, 1}, rows, panels, scale, as<T>(bias), written);
    });
  })
}

EXPORT void test_linear_int8(void* pool, i64 dtype, const void* x, i64 ldx, const float* x_scale, i64 rows, const i8* w, i64 n,
                             i64 k, const float* scale, const void* bias, const void* residual, void* out) {
  FOR_DTYPE(dtype, {
    Panels<i8> panels{w, n, k};
    Written<T> written{rows_of<const T>(residual, n), rows_of<T>(out, n)};
    on(pool, [&](Team& t) {
      if (x_scale)
        linear_w8a8<T>(t, rows_of<const i8>(x, ldx), rows_of<const float>(x_scale, 1), rows, panels, scale, as<T>(bias), written);
      else linear_int8<T>(t, rows_of<const T>(x, ldx), rows, panels, scale, as<T>(bias), written);
    });
  })
}

// How the rows come about: 0 as they are, 1 rms_norm, 2 rms_norm_add with y, 3 layer_norm with y as bias, 4 silu_mul by y.
EXPORT void test_quantize(void* pool, i64 dtype, i64 op, const void* x, i64 ldx, const void* y, const void* weight, float eps,
                          float offset, i64 early, i64 rows, i64 width, i8* out, float* scale, void* total) {
  Norm norm{eps, offset, early != 0};
  FOR_DTYPE(dtype, {
    auto in = rows_of<const T>(x, ldx), other = rows_of<const T>(y, width);
    Rows<i8> q{out, width};
    Rows<float> s{scale, 1};
    on(pool, [&](Team& t) {
      if (op == 0) quantize_rows<T>(t, in, rows, width, q, s);
      if (op == 1) rms_norm_quantize<T>(t, in, as<T>(weight), norm, rows, width, q, s);
      if (op == 2) rms_norm_add_quantize<T>(t, in, other, as<T>(weight), norm, rows, width, q, s, rows_of<T>(total, width));
      if (op == 3) layer_norm_quantize<T>(t, in, as<T>(weight), as<T>(y), eps, rows, width, q, s);
      if (op == 4) silu_mul_quantize<T>(t, in, other, rows, width, q, s);
    });
  })
}
