#include "units.h"

EXPORT void test_rope(void* pool, i64 dtype, const void* x, i64 ldx, const i64* positions, const float* inv_freq,
                      float scaling, i64 half, i64 pairs, i64 rows, i64 heads, i64 dim, float* table, void* out) {
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      auto angles = rows_of<float>(table, 2 * half);
      rope_table(t, positions, inv_freq, scaling, rows, half, angles);
      t.barrier();
      rope<T>(t, rows_of<const T>(x, ldx), angles, half, Pairs(pairs), rows, heads, dim, rows_of<T>(out, heads * dim));
    });
  })
}

// fused: rope on q and k on the way; else plain kv_write.
EXPORT void test_kv_write(void* pool, i64 dtype, i64 int8, i64 fused, const void* q, const void* k, const void* v, i64 ld,
                          const float* table, i64 half, void* cache, i64 layers, i64 layer, i64 block_size, i64 kv_heads,
                          i64 dim, const i64* slots, i64 rows, i64 heads, void* out) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    auto key = rows_of<const T>(k, ld), value = rows_of<const T>(v, ld);
    on(pool, [&](Team& t) {
      if (fused)
        rope_kv_write<T>(t, rows_of<const T>(q, ld), key, value, rows_of<const float>(table, 2 * half), half, HALVES, c, slots,
                         rows, heads, rows_of<T>(out, heads * dim));
      else kv_write<T>(t, c, key, value, slots, rows);
    });
  })
}

EXPORT void test_norm_rope_kv_write(void* pool, i64 dtype, i64 int8, const void* q, const void* k, const void* v, i64 ld,
                                    const void* q_weight, const void* k_weight, float eps, float offset, i64 early,
                                    const float* table, i64 half, void* cache, i64 layers, i64 layer, i64 block_size,
                                    i64 kv_heads, i64 dim, const i64* slots, i64 rows, i64 heads, void* out) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    Norm norm{eps, offset, early != 0};
    on(pool, [&](Team& t) {
      norm_rope_kv_write<T>(t, rows_of<const T>(q, ld), rows_of<const T>(k, ld), rows_of<const T>(v, ld), as<T>(q_weight),
                            as<T>(k_weight), norm, rows_of<const float>(table, 2 * half), half, HALVES, c, slots, rows,
                            heads, rows_of<T>(out, heads * dim));
    });
  })
}

// x int8 with scales if x_scale, weights in T if there is no scale, in four bits if there are scales of groups.
EXPORT void test_qkv_rope_kv_write(void* pool, i64 dtype, i64 int8, const void* x, const float* x_scale, const void* w,
                                   const i8* group_scale, i64 group, const float* scale, i64 k, const void* bias,
                                   const void* q_weight, const void* k_weight, float eps, float offset, i64 early,
                                   const float* table, i64 half, void* cache, i64 layers, i64 layer, i64 block_size,
                                   i64 kv_heads, i64 dim, const i64* slots, i64 rows, i64 heads, void* out) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    Norm norm{eps, offset, early != 0};
    const i64 n = (heads + 2 * kv_heads) * dim;
    const Heads<T, S> to{as<T>(q_weight), as<T>(k_weight), norm, rows_of<const float>(table, 2 * half), half, HALVES, c, slots,
                         rows, heads, rows_of<T>(out, heads * dim)};
    on(pool, [&](Team& t) {
      const auto floats = rows_of<const T>(x, k);
      const auto integers = rows_of<const i8>(x, k);
      const auto scales = rows_of<const float>(x_scale, 1);
      const Panels<i8> bytes{static_cast<const i8*>(w), n, k};
      const Int4Panels fours{static_cast<const u8*>(w), group_scale, n, k, group};
      if (group_scale) qkv_rope_kv_write_w4a8<T, S>(t, integers, scales, fours, scale, as<T>(bias), to);
      else if (x_scale) qkv_rope_kv_write_w8a8<T, S>(t, integers, scales, bytes, scale, as<T>(bias), to);
      else if (scale) qkv_rope_kv_write_int8<T, S>(t, floats, bytes, scale, as<T>(bias), to);
      else qkv_rope_kv_write<T, S>(t, floats, Panels<T>{as<T>(w), n, k}, as<T>(bias), to);
    });
  })
}

EXPORT void test_move_blocks(i64 dtype, i64 int8, i64 pack, void* cache, i64 layers, i64 block_size, i64 kv_heads, i64 dim,
                             const i32* blocks, i64 count, void* canonical) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, 0, block_size, kv_heads, dim};
    if (pack) move_blocks<S, true>(c, blocks, count, static_cast<S*>(canonical));
    else move_blocks<S, false>(c, blocks, count, static_cast<S*>(canonical));
  })
}

EXPORT void test_move_latents(i64 dtype, i64 int8, i64 pack, void* cache, i64 layers, i64 block_size, i64 dim,
                              const i32* blocks, i64 count, void* canonical) {
  FOR_CACHE(dtype, int8, {
    Latent<S> c{static_cast<S*>(cache), layers, 0, block_size, dim, 0};
    if (pack) move_blocks<S, true>(c, blocks, count, static_cast<S*>(canonical));
    else move_blocks<S, false>(c, blocks, count, static_cast<S*>(canonical));
  })
}
