#include "units.h"

EXPORT void test_linear(void* pool, i64 dtype, const void* x, i64 ldx, i64 rows, const void* w, i64 n, i64 k,
                        const void* bias, void* out, i64 ldo, i64 wide) {
  FOR_DTYPE(dtype, {
    Panels<T> panels{as<T>(w), n, k};
    on(pool, [&](Team& t) {
      if (wide) linear<T, float>(t, rows_of<const T>(x, ldx), rows, panels, as<T>(bias), rows_of<float>(out, ldo));
      else linear<T, T>(t, rows_of<const T>(x, ldx), rows, panels, as<T>(bias), rows_of<T>(out, ldo));
    });
  })
}

EXPORT void test_linear_add(void* pool, i64 dtype, const void* x, i64 rows, const void* w, i64 n, i64 k, const void* bias,
                            const void* residual, void* out) {
  FOR_DTYPE(dtype, {
    Panels<T> panels{as<T>(w), n, k};
    on(pool, [&](Team& t) {
      linear_add<T, T>(t, rows_of<const T>(x, k), rows, panels, as<T>(bias), rows_of<const T>(residual, n), rows_of<T>(out, n));
    });
  })
}

EXPORT void test_linear_silu_mul(void* pool, i64 dtype, const void* x, i64 stride, i64 rows, const void* w, i64 width, i64 k,
                                 const void* bias, void* out) {
  FOR_DTYPE(dtype, {
    Panels<T> panels{as<T>(w), 2 * width, k, width / 16};
    on(pool, [&](Team& t) {
      linear_silu_mul<T>(t, rows_of<const T>(x, stride), rows, panels, as<T>(bias), rows_of<T>(out, width));
    });
  })
}

EXPORT void test_head_linear(void* pool, i64 dtype, const void* x, i64 rows, i64 heads, const void* w, i64 n, i64 k,
                             void* out) {
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      head_linear<T>(t, rows_of<const T>(x, heads * k), rows, heads, Panels<T>{as<T>(w), n, k}, rows_of<T>(out, heads * n));
    });
  })
}
