// The interface of generated code: one step's sizes, and the arena's pools, weights and the KV pool by number; and the
// definitions that generated code makes for entry.h.
#pragma once
#include <algorithm>

#include "attention.h"
#include "inferc_abi.h"
#include "lora.h"
#include "moe.h"
#include "int4.h"
#include "quantize.h"
#include "sample.h"

#define INFERC_CHECK(condition) \
  if (!(condition)) return __LINE__

namespace inferc {

// The arena: values with one row per token, per logits row and per sequence, then those of `sample` (64 rows), then
// shared scratch, then the threads' scratch. A pool's value at `offset` bytes per row starts at offset * (the pool's
// maximum rows).
struct Arena {
  i64 per_token, per_row, per_seq, per_sample;
  i64 scratch, scratch_per_token, scratch_per_row, per_thread;
};

// The shape of the KV pool of one group.
enum PoolKind { KEYS_VALUES, LATENTS };
enum PoolType { FLOAT32, BFLOAT16, INT8 };
struct PoolShape {
  PoolKind kind;
  PoolType type;
  i64 layers, block_size, heads, dim;
};

template <class T>
INLINE Rows<T> shifted(Rows<T> value, i64 rows) {
  return {value.data + rows * value.stride, value.stride};
}

// Copies the rows of a node that the host asked for.
__attribute__((noinline)) inline void tap(const InfercTaps& taps, i64 node, const void* data, i64 rows, i64 stride) {
  const bool by_logits = taps.by_logits_row[node];
  const i64* wanted = by_logits ? taps.logits_rows : taps.token_rows;
  const i64 count = by_logits ? taps.num_logits_rows : taps.num_token_rows, bytes = taps.row_bytes[node];
  const i64 first = taps.seen[node];  // logits come at most 64 rows at a time
  taps.seen[node] += rows;
  const i64* end = std::lower_bound(wanted, wanted + count, first + rows);
  for (const i64* row = std::lower_bound(wanted, wanted + count, first); row < end; ++row)
    memcpy(taps.values + taps.places[node] + (row - wanted) * bytes,
           static_cast<const char*>(data) + (*row - first) * stride, size_t(bytes));
}

struct Step {
  const InfercHost* host;
  const StepArgs& a;
  char *token_pool, *row_pool, *seq_pool, *sample_pool, *scratch, *thread_scratch;
  i64 tokens, rows, seqs, per_thread;

  Step(const InfercHost* host_, const StepArgs& args, void* arena, const Arena& layout)
      : host(host_), a(args), tokens(args.num_tokens), rows(args.num_rows), seqs(args.num_seqs) {
    token_pool = static_cast<char*>(arena);
    row_pool = token_pool + layout.per_token * a.max_tokens;
    seq_pool = row_pool + layout.per_row * a.max_rows;
    sample_pool = seq_pool + layout.per_seq * a.max_seqs;
    scratch = sample_pool + layout.per_sample * INFERC_SAMPLE_ROWS;
    thread_scratch =
        scratch + layout.scratch + layout.scratch_per_token * a.max_tokens + layout.scratch_per_row * a.max_rows;
    per_thread = layout.per_thread;
  }
  // The rows of a value: `offset` in its pool, then `column` bytes into each row; the stride is in elements.
  template <class T>
  INLINE Rows<T> token(i64 offset, i64 column, i64 stride) const {
    return {reinterpret_cast<T*>(token_pool + offset * a.max_tokens + column), stride};
  }
  template <class T>
  INLINE Rows<T> row(i64 offset, i64 column, i64 stride) const {
    return {reinterpret_cast<T*>(row_pool + offset * a.max_rows + column), stride};
  }
  template <class T>
  INLINE Rows<T> seq(i64 offset, i64 column, i64 stride) const {
    return {reinterpret_cast<T*>(seq_pool + offset * a.max_seqs + column), stride};
  }
  template <class T>
  INLINE Rows<T> sample(i64 offset, i64 column, i64 stride) const {
    return {reinterpret_cast<T*>(sample_pool + offset * INFERC_SAMPLE_ROWS + column), stride};
  }
  INLINE i64* masses(int group) const { return a.masses ? a.masses[group] : nullptr; }
  INLINE Echoes echoes(int group) const {
    return a.num_echoes ? Echoes{a.echo_source[group], a.echo_target[group], a.num_echoes[group]} : Echoes{};
  }
  // tokens_of_rows: the token of each row, or null if the rows are the tokens.
  INLINE StepAdapters adapters(const i32* tokens_of_rows) const { return {a.adapters, a.adapter_ids, tokens_of_rows}; }
  template <class T>
  INLINE const T* weight(i64 index) const {
    return static_cast<const T*>(a.weights[index]);
  }
  template <class T>
  INLINE Cache<T> cache(int group, i64 layers, i64 layer, i64 block_size, i64 heads, i64 dim) const {
    return {static_cast<T*>(a.kv_cache[group]), layers, layer, block_size, heads, dim};
  }
  template <class T>
  INLINE Latent<T> latent(int group, i64 layers, i64 layer, i64 block_size, i64 dim, i64 v_dim) const {
    return {static_cast<T*>(a.kv_cache[group]), layers, layer, block_size, dim, v_dim};
  }
  // The threads' scratch: a row for each thread, or all of it for work that they share.
  INLINE Rows<char> scratch_of_threads() const { return {thread_scratch, per_thread}; }
  INLINE float* shared_scratch() const { return reinterpret_cast<float*>(thread_scratch); }
  INLINE i64 shared_floats(const Team& team) const { return team.count * per_thread / 4; }

  // Shows a finished value to the host, if the host asked for it. A thread that only copies makes no other thread wait:
  // there is a barrier anyway before the memory is written again.
  template <class T>
  INLINE void observe(Team& team, i64 node, i64 layer, Rows<T> value, i64 count) const {
    if (!host) return;
    const bool taps = host->taps && host->taps->places[node] >= 0;
    const bool shows = host->observe && (host->observed_node < 0 || host->observed_node == node);
    if (!taps && !shows) return;
    const i64 stride = value.stride * i64(sizeof(T));
    team.barrier();
    if (taps && team.tid == 0) tap(*host->taps, node, value.data, count, stride);
    if (!shows) return;
    if (team.tid == 0) host->observe(host->context, i32(node), i32(layer), value.data, count, stride);
    team.barrier();
  }
};

// The definitions that every generated program makes.
extern const Arena ARENA;
extern const bool COLLECTIVES, HIDDEN_IN, HIDDEN_OUT;
extern const int KV_GROUPS;
extern const PoolShape KV_POOLS[];
void step_thread(Team& t, const Step& s);  // every thread runs it
Rows<float> head_thread(Team& t, const Step& s, i64 first, i64 rows);  // the logits of `rows` rows (at most 64)

}  // namespace inferc
