#include "units.h"

// `test_attention` with a bias of the distance between key and query; slopes [heads].
EXPORT void test_alibi(void* pool, i64 dtype, i64 int8, const void* q, void* out, void* cache, i64 layers, i64 layer,
                       i64 block_size, i64 kv_heads, i64 dim, const i32* table, i64 max_blocks, const i32* starts,
                       const i32* lengths, const void* sinks, i64 seqs, i64 heads, float scale, float softcap, i64 mask,
                       i64 window, float* partials, i64 max_partials, const i32* mass_from, i64* masses,
                       const float* slopes) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    Attention<T, Cache<S>, Alibi> a{rows_of<const T>(q, heads * dim), rows_of<T>(out, heads * dim), c, table, max_blocks,
                                    starts, lengths, as<T>(sinks), seqs, heads, scale, softcap, Mask(mask), window, partials,
                                    max_partials, mass_from, masses, {}, slopes};
    on(pool, [&](Team& t) { paged_attention(t, a); });
  })
}
