#include "units.h"

EXPORT void test_layer_norm(void* pool, i64 dtype, const void* x, i64 ldx, const void* weight, const void* bias, float eps,
                            i64 rows, i64 parts, i64 width, i64 own, void* out) {
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      layer_norm<T>(t, rows_of<const T>(x, ldx), as<T>(weight), as<T>(bias), eps, rows, parts, width, own,
                    rows_of<T>(out, parts * width));
    });
  })
}

// One function of simd.h over float32.
EXPORT void test_function(void* pool, i64 function, const float* x, i64 count, float* out) {
  auto run = [&](auto f) {
    on(pool, [&](Team& t) {
      pointwise<float>(t, 1, 1, count, Rows<float>{out, count}, [&](i64, i64, i64 i, i64 n) { return f(load(x + i, n)); });
    });
  };
  if (function == 0) run([](Vec v) { return erf(v); });
  if (function == 1) run([](Vec v) { return gelu(v); });
  if (function == 2) run([](Vec v) { return gelu_tanh(v); });
  if (function == 3) run([](Vec v) { return sigmoid(v); });
  if (function == 4) run([](Vec v) { return tanh(v); });
  if (function == 5) run([](Vec v) { return floor_each(v); });
  if (function == 6) run([](Vec v) { return log_each(absolute(v)); });
  if (function == 7) run([](Vec v) { return rsqrt_each(absolute(v)); });
}

EXPORT void test_rms_norm(void* pool, i64 dtype, const void* x, i64 ldx, const void* residual, const void* weight, float eps,
                          float offset, i64 early, i64 rows, i64 parts, i64 width, void* out, void* total) {
  Norm norm{eps, offset, early != 0};
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      if (residual)
        rms_norm_add<T>(t, rows_of<const T>(x, ldx), rows_of<const T>(residual, width), as<T>(weight), norm, rows, width,
                        rows_of<T>(out, width), rows_of<T>(total, width));
      else
        rms_norm<T>(t, rows_of<const T>(x, ldx), as<T>(weight), norm, rows, parts, width, rows_of<T>(out, parts * width));
    });
  })
}

EXPORT void test_zip(void* pool, i64 dtype, i64 op, const void* a, i64 lda, const void* b, i64 ldb, i64 rows, i64 width,
                     void* out) {
  FOR_DTYPE(dtype, {
    auto x = rows_of<const T>(a, lda), y = rows_of<const T>(b, ldb);
    auto z = rows_of<T>(out, width);
    on(pool, [&](Team& t) {
      if (op == 0) add<T>(t, x, y, rows, width, z);
      if (op == 1) mul<T>(t, x, y, rows, width, z);
      if (op == 2) silu_mul<T>(t, x, y, rows, width, z);
      if (op == 3) add_scalar<T>(t, x, 0.3f, rows, width, z);
      if (op == 4) mul_scalar<T>(t, x, 0.3f, rows, width, z);
      if (op == 5) gelu_mul<T>(t, x, y, rows, width, z);
      if (op == 6) gelu_tanh_mul<T>(t, x, y, rows, width, z);
    });
  })
}

EXPORT void test_embedding(void* pool, i64 dtype, i64 packed, const void* table, i64 n, i64 width, const i32* ids, i64 rows,
                           void* out) {
  FOR_DTYPE(dtype, {
    auto z = rows_of<T>(out, width);
    on(pool, [&](Team& t) {
      if (packed) embedding_panel<T>(t, Panels<T>{as<T>(table), n, width}, ids, rows, z);
      else embedding<T>(t, as<T>(table), ids, rows, width, z);
    });
  })
}

EXPORT void test_embedding_int8(void* pool, i64 dtype, i64 packed, const i8* table, const float* scale, i64 n, i64 width,
                                const i32* ids, i64 rows, void* out) {
  FOR_DTYPE(dtype, {
    auto z = rows_of<T>(out, width);
    on(pool, [&](Team& t) {
      if (packed) embedding_panel_int8<T>(t, Panels<i8>{table, n, width}, scale, ids, rows, z);
      else embedding_int8<T>(t, table, scale, ids, rows, width, z);
    });
  })
}

EXPORT void test_index_select(void* pool, i64 dtype, const void* x, i64 ldx, const i32* index, i64 rows, i64 width, void* out) {
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) { index_select<T>(t, rows_of<const T>(x, ldx), index, rows, width, rows_of<T>(out, width)); });
  })
}

// Two parts of each head; the second is one head for all if `shared`.
EXPORT void test_cat(void* pool, i64 dtype, const void* a, i64 wa, const void* b, i64 wb, i64 shared, i64 rows, i64 heads,
                     void* out) {
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      cat<T>(t, rows, heads,
             {{rows_of<const T>(a, heads * wa), wa, heads}, {rows_of<const T>(b, shared ? wb : heads * wb), wb, shared ? 1 : heads}},
             rows_of<T>(out, heads * (wa + wb)));
    });
  })
}

EXPORT void test_resize_heads(void* pool, i64 dtype, const void* x, i64 rows, i64 heads, i64 had, i64 dim, void* out) {
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      resize_heads<T>(t, rows_of<const T>(x, heads * had), rows, heads, had, dim, rows_of<T>(out, heads * dim));
    });
  })
}

EXPORT void test_exp(const float* x, i64 n, float* out) {
  for (i64 i = 0; i < n; i += LANES) store(out + i, exp(load(x + i, n - i)), n - i);
}
EXPORT void test_round(const float* x, i64 n, uint16_t* out) {
  for (i64 i = 0; i < n; i += LANES) store(reinterpret_cast<bf16*>(out) + i, load(x + i, n - i), n - i);
}
