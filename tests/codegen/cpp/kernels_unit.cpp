// The kernels as plain C functions for the tests: dtype 0 is float32, 1 is bfloat16.
#include "attention.h"
#include "inferc_abi.h"
#include "int4.h"
#include "moe.h"
#include "quantize.h"
#include "sample.h"

using namespace inferc;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class F>
void on(void* threads, F f) {
  parallel(threads, f);
}
template <class T>
Rows<T> rows_of(const void* data, i64 stride) {
  return {const_cast<T*>(static_cast<const T*>(data)), stride};
}
template <class T>
const T* as(const void* data) {
  return static_cast<const T*>(data);
}
// Runs a block with T as float or bf16; in float32 the library with emulated tiles would be that of avx512.
#ifdef INFERC_AMX_EMULATED
#define FOR_DTYPE(dtype, ...)      \
  {                                \
    if (dtype != 1) __builtin_trap(); \
    using T = bf16;                \
    __VA_ARGS__                    \
  }
#else
#define FOR_DTYPE(dtype, ...) \
  if (dtype == 1) {           \
    using T = bf16;           \
    __VA_ARGS__               \
  } else {                    \
    using T = float;          \
    __VA_ARGS__               \
  }
#endif

// The same, and with S as int8 or as T, for what stores K and V.
#define FOR_CACHE(dtype, int8, ...) \
  FOR_DTYPE(dtype, {                \
    if (int8) {                     \
      using S = i8;                 \
      __VA_ARGS__                   \
    } else {                        \
      using S = T;                  \
      __VA_ARGS__                   \
    }                               \
  })

}  // namespace

EXPORT void* threads_open(int count) { return open_pool(count); }
EXPORT void threads_close(void* pool) { close_pool(static_cast<Pool*>(pool)); }

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
      linear<T, T>(t, rows_of<const T>(x, k), rows, panels, as<T>(bias), rows_of<const T>(residual, n), rows_of<T>(out, n));
    });
  })
}

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

EXPORT void test_linear_w4a8(void* pool, i64 dtype, const i8* x, i64 ldx, const float* x_scale, i64 rows, const u8* w,
                             const u16* scale, i64 n, i64 k, i64 group, const void* bias, const void* residual, void* out) {
  FOR_DTYPE(dtype, {
    Int4Panels panels{w, scale, n, k, group};
    Written<T> written{rows_of<const T>(residual, n), rows_of<T>(out, n)};
    on(pool, [&](Team& t) {
      linear_w4a8<T>(t, Rows<const i8>{x, ldx}, Rows<const float>{x_scale, 1}, rows, panels, as<T>(bias), written);
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

EXPORT void test_qkv_rope_kv_write(void* pool, i64 dtype, i64 int8, const void* x, const void* w, i64 k, const void* bias,
                                   const void* q_weight, const void* k_weight, float eps, float offset, i64 early,
                                   const float* table, i64 half, void* cache, i64 layers, i64 layer, i64 block_size,
                                   i64 kv_heads, i64 dim, const i64* slots, i64 rows, i64 heads, void* out) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    Panels<T> panels{as<T>(w), (heads + 2 * kv_heads) * dim, k};
    Norm norm{eps, offset, early != 0};
    on(pool, [&](Team& t) {
      qkv_rope_kv_write<T>(t, rows_of<const T>(x, k), panels, as<T>(bias), as<T>(q_weight), as<T>(k_weight), norm,
                           rows_of<const float>(table, 2 * half), half, HALVES, c, slots, rows, heads,
                           rows_of<T>(out, heads * dim));
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

EXPORT void test_attention(void* pool, i64 dtype, i64 int8, const void* q, void* out, void* cache, i64 layers, i64 layer,
                           i64 block_size, i64 kv_heads, i64 dim, const i32* table, i64 max_blocks, const i32* starts,
                           const i32* lengths, const void* sinks, i64 seqs, i64 heads, float scale, float softcap, i64 mask,
                           i64 window, float* partials, i64 max_partials) {
  FOR_CACHE(dtype, int8, {
    Cache<S> c{static_cast<S*>(cache), layers, layer, block_size, kv_heads, dim};
    Attention<T, Cache<S>> a{rows_of<const T>(q, heads * dim), rows_of<T>(out, heads * dim), c, table, max_blocks, starts,
                             lengths, as<T>(sinks), seqs, heads, scale, softcap, Mask(mask), window, partials, max_partials};
    on(pool, [&](Team& t) { paged_attention(t, a); });
  })
}

EXPORT void test_latent(void* pool, i64 dtype, i64 int8, i64 write, const void* x, void* out, void* cache, i64 layers,
                        i64 layer, i64 block_size, i64 dim, i64 v_dim, const i64* slots, i64 rows, const i32* table,
                        i64 max_blocks, const i32* starts, const i32* lengths, i64 seqs, i64 heads, float scale, i64 mask,
                        i64 window, float* partials, i64 max_partials) {
  FOR_CACHE(dtype, int8, {
    Latent<S> c{static_cast<S*>(cache), layers, layer, block_size, dim, v_dim};
    Attention<T, Latent<S>> a{rows_of<const T>(x, heads * dim), rows_of<T>(out, heads * v_dim), c, table, max_blocks,
                              starts, lengths, nullptr, seqs, heads, scale, 0.0f, Mask(mask), window, partials, max_partials};
    on(pool, [&](Team& t) {
      if (write) latent_write<T>(t, c, rows_of<const T>(x, dim), slots, rows);
      else paged_attention(t, a);
    });
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

EXPORT void test_moe_routing(void* pool, i64 dtype, const void* logits, const float* bias, i64 rows, i64 score,
                             i64 group_score, i64 experts, i64 top_k, i64 groups, i64 kept_groups, i64 renormalize,
                             float scale, i32* ids, float* weights) {
  Routing routing{Score(score), GroupScore(group_score), experts, top_k, groups, kept_groups, renormalize != 0, scale};
  FOR_DTYPE(dtype, {
    on(pool, [&](Team& t) {
      moe_routing<T>(t, rows_of<const T>(logits, experts), bias, rows, routing, rows_of<i32>(ids, top_k),
                     rows_of<float>(weights, top_k));
    });
  })
}

// Experts whose weights lie in W, on rows of X.
template <class T, class W, class X>
void run_experts(void* pool, const void* x, const float* x_scale, const i32* ids, const float* weights, const void* gate_up,
                 const void* down, const void* gate_up_bias, const void* down_bias, const void* gate_up_scale,
                 const void* down_scale, i64 group, i64 activation, float alpha, float limit, bool scale_input, i64 rows,
                 i64 top_k, i64 experts, i64 hidden, i64 inter, void* out, char* work) {
  using Matrix = ExpertMatrix<T, W>;
  using Scale = typename Matrix::Scale;
  Matrix first{as<W>(gate_up), as<T>(gate_up_bias), 2 * inter, hidden, as<Scale>(gate_up_scale), group};
  Matrix second{as<W>(down), as<T>(down_bias), hidden, inter, as<Scale>(down_scale), group};
  Experts<T, W, X> m{rows_of<const X>(x, hidden), {x_scale, 1}, rows_of<const i32>(ids, top_k),
                     rows_of<const float>(weights, top_k), first, second, Activation(activation), alpha, limit, scale_input,
                     rows, top_k, experts, hidden, inter, rows_of<T>(out, hidden), work};
  on(pool, [&](Team& t) { moe_experts(t, m); });
}

// Weights in T without scales, in int8 (and x too if x_scale), or in four bits if group.
EXPORT void test_moe_experts(void* pool, i64 dtype, const void* x, const float* x_scale, const i32* ids, const float* weights,
                             const void* gate_up, const void* down, const void* gate_up_bias, const void* down_bias,
                             const void* gate_up_scale, const void* down_scale, i64 group, i64 activation, float alpha,
                             float limit, i64 scale_input, i64 rows, i64 top_k, i64 experts, i64 hidden, i64 inter, void* out,
                             char* work) {
  auto run = [&]<class T, class W, class X>() {
    run_experts<T, W, X>(pool, x, x_scale, ids, weights, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale,
                         group, activation, alpha, limit, scale_input != 0, rows, top_k, experts, hidden, inter, out, work);
  };
  FOR_DTYPE(dtype, {
    if (group) run.template operator()<T, u8, i8>();
    else if (x_scale) run.template operator()<T, i8, i8>();
    else if (gate_up_scale) run.template operator()<T, i8, T>();
    else run.template operator()<T, T, T>();
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

EXPORT void test_exp(const float* x, i64 n, float* out) {
  for (i64 i = 0; i < n; i += LANES) store(out + i, exp(load(x + i, n - i)), n - i);
}
EXPORT void test_round(const float* x, i64 n, uint16_t* out) {
  for (i64 i = 0; i < n; i += LANES) store(reinterpret_cast<bf16*>(out) + i, load(x + i, n - i), n - i);
}

EXPORT double test_uniform(u64 seed, u64 counter) { return uniform(seed, counter); }
EXPORT void test_philox(u64 key, u64 counter, u32* out) {
  u32 words[4];
  philox(key, counter, words);
  memcpy(out, words, sizeof words);
}
// All rows, with `bytes` of scratch for each thread.
EXPORT void test_sample(void* pool, const SampleArgs* a, const float* logits, char* scratch, i64 bytes) {
  on(pool, [&](Team& t) { sample_rows(t, *a, 0, a->step->num_rows, {logits, a->vocab_size}, {scratch, bytes}); });
}
EXPORT void test_score(void* pool, const ScoreArgs* a, const float* logits, char* scratch, i64 bytes) {
  on(pool, [&](Team& t) { score_rows(t, *a, 0, a->step->num_rows, {logits, a->vocab_size}, {scratch, bytes}); });
}
// The largest of the list that, with all above it, weighs `target`: see `threshold`.
EXPORT double test_threshold(float* list, i64 count, double target, i64 by_mass, double* above) {
  return by_mass ? threshold<true>(list, count, target, *above) : threshold<false>(list, count, target, *above);
}

// Counts how often each of `total` items is handed out; pieces of one thread rise, and its first is the one of its number.
EXPORT i64 test_each(void* pool, i64 total, i64 grain, i32* counts) {
  std::atomic<i64> wrong{0};
  on(pool, [&](Team& t) {
    i64 last = -1;
    t.each(total, grain, [&](i64 begin, i64 end) {
      if (last < 0 ? begin != t.tid * grain : begin < last) ++wrong;
      for (i64 i = begin; i < end; ++i) __atomic_fetch_add(counts + i, 1, __ATOMIC_RELAXED);
      last = end;
    });
    t.barrier({counts, total * 4});
  });
  return wrong.load();
}

EXPORT i64 test_barriers(void* pool, i64 rounds) {  // every thread must see every other's last round
  std::atomic<i64> arrived{0}, wrong{0};
  on(pool, [&](Team& t) {
    for (i64 round = 1; round <= rounds; ++round) {
      ++arrived;
      t.barrier();
      if (arrived.load() != round * t.count) ++wrong;
      t.barrier();
    }
  });
  return wrong.load();
}
