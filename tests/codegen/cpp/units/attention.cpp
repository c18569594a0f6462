#include "units.h"

EXPORT void test_attention(void* pool, i64 dtype, i64 int8, const void* q, void* out, void* cache, i64 layers, i64 layer,
                           i64 block_size, i64 kv_heads, i64 dim, const i32* table, i64 max_blocks, const i32* starts,
                           const i32* lengths, const void* sinks, i64 seqs, i64 heads, float scale, float softcap, i64 mask,
                           i64 window, float* partials, i64 max_partials, const i32* mass_from, i64* masses) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    Attention<T, Cache<S>> a{rows_of<const T>(q, heads * dim), rows_of<T>(out, heads * dim), c, table, max_blocks, starts,
                             lengths, as<T>(sinks), seqs, heads, scale, softcap, Mask(mask), window, partials, max_partials,
                             mass_from, masses};
    on(pool, [&](Team& t) { paged_attention(t, a); });
  })
}

EXPORT void test_latent(void* pool, i64 dtype, i64 int8, i64 write, const void* x, void* out, void* cache, i64 layers,
                        i64 layer, i64 block_size, i64 dim, i64 v_dim, const i64* slots, i64 rows, const i32* table,
                        i64 max_blocks, const i32* starts, const i32* lengths, i64 seqs, i64 heads, float scale, i64 mask,
                        i64 window, float* partials, i64 max_partials, const i32* mass_from, i64* masses) {
  FOR_CACHE(dtype, int8, {
    Latent<S> c{static_cast<S*>(cache), layers, layer, block_size, dim, v_dim};
    Attention<T, Latent<S>> a{rows_of<const T>(x, heads * dim), rows_of<T>(out, heads * v_dim), c, table, max_blocks,
                              starts, lengths, nullptr, seqs, heads, scale, 0.0f, Mask(mask), window, partials, max_partials,
                              mass_from, masses};
    on(pool, [&](Team& t) {
      if (write) latent_write<T>(t, c, rows_of<const T>(x, dim), slots, rows);
      else paged_attention(t, a);
    });
  })
}

// What a layer copies between writing its K and V and attending to them.
EXPORT void test_echo(void* pool, i64 dtype, i64 int8, void* cache, i64 layers, i64 layer, i64 block_size, i64 kv_heads,
                      i64 dim, const i64* source, const i64* target, i64 count) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    on(pool, [&](Team& t) { echo_slots(t, c, {source, target, count}); });
  })
}

// out: the number of groups, then of each its first sequence, how many, and the keys that they share.
EXPORT void test_sharing(const i32* table, i64 max_blocks, const i32* lengths, i64 seqs, i64 block_size, i64 most, i64* out) {
  Attention<float> a{};
  a.cache.block_size = block_size;
  a.block_table = table;
  a.max_blocks = max_blocks;
  a.seq_lens = lengths;
  a.num_seqs = seqs;
  Sharing found{0, out + 1, out + 1 + seqs, out + 1 + 2 * seqs};
  find_sharing(a, most, found);
  out[0] = found.leaders;
}
