// The interface between a compiled step and the process that loads it. Plain C structs, filled by ctypes.
// The layout changes only together with INFERC_ABI.
#pragma once
#include <stdint.h>

#define INFERC_ABI 10
#define INFERC_SAMPLE_ROWS 64  // the most logits rows that exist at a time
#define INFERC_MAX_TOP_LOGPROBS 64
#define INFERC_MAX_DRAFTED 63  // ids of a sequence in a step

// `op` of a collective. Groups: 0 tensor, 1 expert.
#define INFERC_ALL_REDUCE_F32 0   // the sum over the ranks of a group, in place, of `count` elements at `data`
#define INFERC_ALL_REDUCE_BF16 1  // the sum of bf16 elements; they are added in float32 and the sum is rounded once
#define INFERC_EXCHANGE 2         // bytes from every rank to every rank; `data` is an InfercExchange, `count` the ranks
#define INFERC_GROUPS 2

extern "C" {

// For each rank: the bytes that go to it from `send`, and those that come from it into `receive`, in the sender's
// order. The bytes that a rank sends to itself may already be in place.
struct InfercExchange {
  const char* send;
  char* receive;
  const int64_t *send_offsets, *send_bytes, *receive_offsets, *receive_bytes;
};

// The calls that a step makes to its host, from thread 0 while the others wait; a null function costs one branch.
struct InfercHost {
  uint64_t abi;
  void* context;  // the argument that both calls get
  // After each observable node (program.json "observable"): rows of `row_bytes` bytes at `data`, `stride` bytes apart,
  // which it may change.
  void (*observe)(void* context, int32_t node, int32_t layer, const void* data, int64_t rows, int64_t stride);
  void (*collective)(void* context, int32_t op, int32_t group, void* data, int64_t count);
  int64_t ranks[INFERC_GROUPS];  // the rank of this process in each group
  const struct InfercTaps* taps;  // null, or the values that the step copies
  int64_t observed_node;          // the only node that `observe` is called for, or -1: all
};

// The rows of nodes that a step copies. For each node, by its number in program.json "observable": where its values
// begin in `values`, or -1; the bytes of a row; whether it has a row for each logits row instead of each token; and how
// many of its rows have been seen in this step, 0 at first.
struct InfercTaps {
  const int64_t* places;
  const int64_t* row_bytes;
  const uint8_t* by_logits_row;
  int64_t* seen;
  const int64_t* token_rows;  // ascending, in [0, num_tokens)
  int64_t num_token_rows;
  const int64_t* logits_rows;  // ascending, in [0, num_rows)
  int64_t num_logits_rows;
  char* values;
};

// A LoRA adapter. For each site, by its number in program.json: its rank, 0 if the adapter has nothing there, and where
// in `data` its two matrices begin, in elements: `down` [rank, in_features] (of an embedding [vocab_size, rank]) and
// `up` [rank, out_features].
struct InfercAdapter {
  const void* data;
  const int64_t *down, *up;
  const int32_t* ranks;
};

struct StepArgs {
  uint64_t abi;
  // This step's sizes, then the maxima that the arena was sized for, each a multiple of 64: only these determine
  // addresses.
  int64_t num_tokens, num_seqs, num_rows;
  int64_t max_tokens, max_seqs, max_rows;
  const int32_t* token_ids;        // [num_tokens]
  const int64_t* positions;        // [num_tokens]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* seq_slots;        // [num_seqs]
  const int32_t* logits_rows;      // [num_rows]
  // One entry per KV group:
  const int64_t* const* slot_mapping;  // [num_tokens]
  const int32_t* const* block_table;   // [num_seqs, max_blocks]
  const int64_t* max_blocks;
  void* const* kv_cache;
  const void* const* weights;  // in the order of program.json "weights"
  void* threads;               // from inferc_threads_open
  const void* hidden_in;       // [num_tokens, hidden_size] of the previous pipeline stage, if there is one
  void* hidden_out;            // [num_tokens, hidden_size] for the next pipeline stage, if there is one
  // The attention mass of KV blocks, if it is asked for; else null. mass_from: for each sequence the first row that
  // counts (its last + 1: none). masses: for each KV group, null or [num_seqs, max_blocks], to which the step adds what
  // the keys of each block get of these rows' probabilities, in all layers and heads, times 2^32.
  const int32_t* mass_from;  // [num_seqs]
  int64_t* const* masses;
  const int32_t* adapter_ids;            // [num_tokens] rows of `adapters`, 0 for none; or null: no token has one
  const struct InfercAdapter* adapters;  // by number; 0 is not read
  // The echoes of a step whose drafts are trees, one entry per KV group; null if there are none. Each layer, when it has
  // written its K and V, copies those of slots echo_source[i] to slots echo_target[i] before it attends to any. No source
  // is a target.
  const int64_t* num_echoes;
  const int64_t* const* echo_source;
  const int64_t* const* echo_target;
};

struct SampleArgs {
  const StepArgs* step;  // the step whose rows are sampled
  int64_t vocab_size;
  // Per row [num_rows], as everything up to num_logprobs. A slot's rows are consecutive: each but the first is that of an
  // id that was drafted, and counts if its parent counts and chooses this id. A slot with counts has at most
  // INFERC_MAX_DRAFTED of these.
  const int32_t* seq_slots;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* typical_p;
  const float* xtc_probability;
  const float* xtc_threshold;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const uint64_t* seeds;
  const uint64_t* counters;
  const int32_t* num_logprobs;
  // Lists of tokens for each row (CSR over the rows); null starts mean no list.
  const int32_t* bias_starts;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* banned_starts;
  const int32_t* banned_ids;
  const int32_t* allowed_starts;
  const int32_t* allowed_ids;
  // Masks of a bit per token, 1 if the token may be chosen: masks[mask_rows[row]] is [(vocab_size + 31) / 32]; -1: the
  // row has none. Null mask_rows: no row has one.
  const int32_t* mask_rows;
  const uint32_t* masks;
  // State of each slot: counts[slot] is null or [vocab_size]; bit 31: the token is in the prompt; the rest: its count
  // in the output.
  uint32_t* const* counts;
  int32_t* last_ids;  // [slots]: the id of the slot's last row that counts
  // Results, for each row.
  uint8_t* failed;  // 1: the processed logits have no finite largest value; the id is then 0
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;  // [num_rows, max_top]
  float* top_logprobs;
  int64_t max_top;
  // [num_rows] the parent of each row: an earlier one of its slot, or -1 for a slot's first. Of one parent's rows no two
  // are of the same id. Null: the parent is the row before.
  const int32_t* parents;
};

struct ScoreArgs {
  const StepArgs* step;
  int64_t vocab_size;
  const int32_t* target_ids;  // [num_rows]
  float* logprobs;            // [num_rows] log-softmax of the raw logits at target_ids
  int32_t* argmax;            // [num_rows]
};

// Every function returns 0, or the line of the first check that failed.
int inferc_abi(void);
// cpus [count]: the processor that each thread stays on, or null. The first entry is ignored: that thread calls the
// steps.
void* inferc_threads_open(int count, const int32_t* cpus);
void inferc_threads_close(void* threads);
int inferc_step(const InfercHost* host, const StepArgs* args, void* arena);
int inferc_sample(const InfercHost* host, const SampleArgs* args, void* arena);
int inferc_score(const InfercHost* host, const ScoreArgs* args, void* arena);
// Copies the K and V of slots source[i] to slots target[i], in order, in every layer of a group.
int inferc_copy_slots(int32_t group, void* kv_cache, const int64_t* source, const int64_t* target, int64_t count);
// Copies between blocks of a pool and the canonical form [count, layers, 2, block_size, num_kv_heads, head_dim]; in
// int8 the four bytes of the scale follow each head_dim.
int inferc_pack_blocks(int32_t group, const void* kv_cache, const int32_t* blocks, int64_t count, void* canonical);
int inferc_unpack_blocks(int32_t group, void* kv_cache, const int32_t* blocks, int64_t count, const void* canonical);
}
