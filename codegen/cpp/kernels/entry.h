// The entry points of a compiled program, the same for all; they use the definitions that step.h asks of each program.
#pragma once
#include <algorithm>
#include <string.h>
#include "peak.h"
#include "step.h"

namespace inferc {

inline int check_step(const StepArgs* a, const void* arena) {
  INFERC_CHECK(a && a->abi == INFERC_ABI);
  INFERC_CHECK(arena && reinterpret_cast<uintptr_t>(arena) % 64 == 0);
  INFERC_CHECK(a->threads);
  INFERC_CHECK(a->num_tokens > 0 && a->num_tokens <= a->max_tokens && a->max_tokens % 64 == 0);
  INFERC_CHECK(a->num_seqs > 0 && a->num_seqs <= a->max_seqs && a->max_seqs % 64 == 0);
  INFERC_CHECK(a->num_rows >= 0 && a->num_rows <= a->max_rows && a->max_rows % 64 == 0);
  INFERC_CHECK((!HIDDEN_IN || a->hidden_in) && (!HIDDEN_OUT || a->hidden_out));
  return 0;
}

template <class S, class F>
int with_pool(const PoolShape& p, F f) {
  if (p.kind == LATENTS) return f(Latent<S>{nullptr, p.layers, 0, p.block_size, p.dim, 0});
  return f(Cache<S>{nullptr, p.layers, 0, p.block_size, p.heads, p.dim});
}

// Calls f(the pool of a group), with a pool that has no memory yet.
template <class F>
int with_cache(int group, F f) {
  INFERC_CHECK(group >= 0 && group < KV_GROUPS);
  const PoolShape& pool = KV_POOLS[group];
  if (pool.type == FLOAT32) return with_pool<float>(pool, f);
  if (pool.type == BFLOAT16) return with_pool<bf16>(pool, f);
  return with_pool<i8>(pool, f);
}

// Calls consume(team, first row, rows, logits) on every chunk of rows, in one parallel region.
template <class F>
void on_logits(const Step& step, F consume) {
  auto region = [&](Team& team) {
    for (i64 first = 0; first < step.rows; first += INFERC_SAMPLE_ROWS) {
      i64 rows = step.rows - first < INFERC_SAMPLE_ROWS ? step.rows - first : INFERC_SAMPLE_ROWS;
      Rows<float> logits = head_thread(team, step, first, rows);
      consume(team, first, rows, logits);
      team.barrier();
    }
  };
  parallel(step.a.threads, region);
}

}  // namespace inferc

extern "C" {

__attribute__((visibility("default"))) int inferc_abi(void) { return INFERC_ABI; }

__attribute__((visibility("default"))) void* inferc_threads_open(int count, const int32_t* cpus) {
  return count > 0 && count < int(inferc::Pool::MOST_THREADS) ? inferc::open_pool(count, cpus) : nullptr;
}

__attribute__((visibility("default"))) void inferc_threads_close(void* threads) {
  if (threads) inferc::close_pool(static_cast<inferc::Pool*>(threads));
}

__attribute__((visibility("default"))) int64_t inferc_busy(void* threads, int32_t type, int64_t rounds) {
  if (type == inferc::INT8) return inferc::busy_team<int8_t>(threads, rounds);
  if (type == inferc::BFLOAT16) return inferc::busy_team<inferc::bf16>(threads, rounds);
  return inferc::busy_team<float>(threads, rounds);
}

__attribute__((visibility("default"))) int inferc_step(const InfercHost* host, const StepArgs* args, void* arena) {
  if (int line = inferc::check_step(args, arena)) return line;
  INFERC_CHECK(!inferc::COLLECTIVES || (host && host->collective));
  inferc::Step step(host, *args, arena, inferc::ARENA);
  auto region = [&](inferc::Team& team) { inferc::step_thread(team, step); };
  inferc::parallel(args->threads, region);
  return 0;
}

__attribute__((visibility("default"))) int inferc_sample(const InfercHost* host, const SampleArgs* args, void* arena) {
  if (int line = inferc::check_step(args->step, arena)) return line;
  INFERC_CHECK(!inferc::HIDDEN_OUT);  // the stage with the LM head has the logits
  INFERC_CHECK(!inferc::COLLECTIVES || (host && host->collective));
  INFERC_CHECK(args->max_top >= 0 && args->max_top <= INFERC_MAX_TOP_LOGPROBS);
  INFERC_CHECK(inferc::are_drafts_short(*args));
  inferc::Step step(host, *args->step, arena, inferc::ARENA);
  inferc::on_logits(step, [&](inferc::Team& team, int64_t first, int64_t rows, inferc::Rows<float> logits) {
    inferc::sample_rows(team, *args, first, rows, logits, step.scratch_of_threads());
  });
  inferc::keep_chosen(*args);
  return 0;
}

__attribute__((visibility("default"))) int inferc_score(const InfercHost* host, const ScoreArgs* args, void* arena) {
  if (int line = inferc::check_step(args->step, arena)) return line;
  INFERC_CHECK(!inferc::HIDDEN_OUT);  // the stage with the LM head has the logits
  INFERC_CHECK(!inferc::COLLECTIVES || (host && host->collective));
  inferc::Step step(host, *args->step, arena, inferc::ARENA);
  inferc::on_logits(step, [&](inferc::Team& team, int64_t first, int64_t rows, inferc::Rows<const float> logits) {
    inferc::score_rows(team, *args, first, rows, logits, step.scratch_of_threads());
  });
  return 0;
}

__attribute__((visibility("default"))) int inferc_copy_slots(int32_t group, void* kv_cache, const int64_t* source,
                                                             const int64_t* target, int64_t count) {
  return inferc::with_cache(group, [&](auto cache) {
    cache.data = static_cast<decltype(cache.data)>(kv_cache);
    inferc::copy_slots(cache, source, target, count);
    return 0;
  });
}

__attribute__((visibility("default"))) int inferc_pack_blocks(int32_t group, const void* kv_cache,
                                                              const int32_t* blocks, int64_t count, void* canonical) {
  return inferc::with_cache(group, [&](auto cache) {
    using T = std::remove_pointer_t<decltype(cache.data)>;
    cache.data = const_cast<T*>(static_cast<const T*>(kv_cache));
    inferc::move_blocks<T, true>(cache, blocks, count, static_cast<T*>(canonical));
    return 0;
  });
}

__attribute__((visibility("default"))) int inferc_unpack_blocks(int32_t group, void* kv_cache, const int32_t* blocks,
                                                                int64_t count, const void* canonical) {
  return inferc::with_cache(group, [&](auto cache) {
    using T = std::remove_pointer_t<decltype(cache.data)>;
    cache.data = static_cast<T*>(kv_cache);
    inferc::move_blocks<T, false>(cache, blocks, count, const_cast<T*>(static_cast<const T*>(canonical)));
    return 0;
  });
}
}
