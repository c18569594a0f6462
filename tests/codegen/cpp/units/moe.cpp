#include "units.h"

EXPORT void test_moe_routing(void* pool, i64 dtype, const void* logits, const float* bias, i64 rows, i64 score,
                             i64 group_score, i64 experts, i64 top_k, i64 groups, i64 kept_groups, i64 renormalize,
                             float scale, float margin, i32* ids, float* weights) {
  Routing routing{Score(score), GroupScore(group_score), experts, top_k, groups, kept_groups, renormalize != 0, scale, margin};
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
                 const void* down, const void* gate_up_bias, const void* down_bias, const float* gate_up_scale,
                 const float* down_scale, const i8* gate_up_group_scale, const i8* down_group_scale, i64 group,
                 i64 activation, float alpha, float limit, bool scale_input, i64 rows, i64 top_k, i64 experts, i64 hidden,
                 i64 inter, void* out, char* work) {
  using Matrix = ExpertMatrix<T, W>;
  Matrix first{as<W>(gate_up), as<T>(gate_up_bias), 2 * inter, hidden, gate_up_scale, gate_up_group_scale, group};
  Matrix second{as<W>(down), as<T>(down_bias), hidden, inter, down_scale, down_group_scale, group};
  Experts<T, W, X> m{rows_of<const X>(x, hidden), {x_scale, 1}, rows_of<const i32>(ids, top_k),
                     rows_of<const float>(weights, top_k), first, second, Activation(activation), alpha, limit, scale_input,
                     rows, top_k, experts, hidden, inter, rows_of<T>(out, hidden), work};
  on(pool, [&](Team& t) { moe_experts(t, m); });
}

// Weights in T without scales, in int8 (and x too if x_scale), or in four bits if group.
EXPORT void test_moe_experts(void* pool, i64 dtype, const void* x, const float* x_scale, const i32* ids, const float* weights,
                             const void* gate_up, const void* down, const void* gate_up_bias, const void* down_bias,
                             const float* gate_up_scale, const float* down_scale, const i8* gate_up_group_scale,
                             const i8* down_group_scale, i64 group, i64 activation, float alpha, float limit,
                             i64 scale_input, i64 rows, i64 top_k, i64 experts, i64 hidden, i64 inter, void* out, char* work) {
  auto run = [&]<class T, class W, class X>() {
    run_experts<T, W, X>(pool, x, x_scale, ids, weights, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale,
                         gate_up_group_scale, down_group_scale, group, activation, alpha, limit, scale_input != 0, rows,
                         top_k, experts, hidden, inter, out, work);
  };
  FOR_DTYPE(dtype, {
    if (group) run.template operator()<T, u8, i8>();
    else if (x_scale) run.template operator()<T, i8, i8>();
    else if (gate_up_scale) run.template operator()<T, i8, T>();
    else run.template operator()<T, T, T>();
  })
}
