// Rope and the paged KV pool.
// A block holds every layer of its group, in a layer every head, of a head first K, then V, with its tokens in pieces
// of 16: attention reads both, and reads long contiguous ranges fastest. Both are stored as the panels of a weight, and
// their products are those of a weight:
// - a piece of K is 16 tokens over the head, [head_dim / unit][16 tokens][unit], for q @ K.T;
// - a piece of V is 16 elements of the head over 32 tokens, [head_dim / 16][32 / unit][16][unit], for
//   probabilities @ V; if the block size is no multiple of 32, it has 16 tokens.
// In int8, a piece ends with its tokens' float32 scales.
#pragma once
#include <type_traits>

#include "int4.h"
#include "quantize.h"

namespace inferc {

constexpr i64 MAX_HEAD_DIM = 512, MAX_LATENT_DIM = 1024;
constexpr i64 VALUE_TOKENS = 32;  // tokens of a piece of V: a step of k on tiles of bfloat16

// The elements that a token's row takes: its own, and for integers those of its scale.
template <class S>
INLINE i64 row_size(i64 dim) {
  return dim + (std::is_same_v<S, i8> ? i64(sizeof(float)) : 0);
}

// One token of a piece of K or of latents, in the storage type S.
template <class S>
struct Place {
  S* piece;
  i64 token, dim;

  INLINE float* scale() const { return reinterpret_cast<float*>(piece + 16 * dim) + token; }
  INLINE S* row() const { return piece + token * dim; }
  // The token's elements [d, d + unit) in a panel.
  INLINE S* unit(i64 d) const { return piece + d * 16 + token * Dot<S>::unit; }
};

// One token of a piece of V.
template <class S>
struct ValuePlace {
  S* piece;
  i64 token, tokens, dim;  // tokens: the number of tokens in the piece

  INLINE float* scale() const { return reinterpret_cast<float*>(piece + tokens * dim) + token; }
  // The line with the token's elements [d, d + 16), which are at place `lane` of each `unit` there.
  INLINE S* line(i64 d) const { return piece + d * tokens + token / Dot<S>::unit * Dot<S>::unit * 16; }
  INLINE i64 lane() const { return token % Dot<S>::unit; }
  // Calls f(element of the piece, d) for each element of the token.
  template <class F>
  INLINE void each(F f) const {
    for (i64 d = 0; d < dim; ++d) f(line(d / 16 * 16)[d % 16 * Dot<S>::unit + lane()], d);
  }
};

// One layer of a group's pool.
template <class S>
struct Cache {
  using Stored = S;
  static constexpr bool latent = false;
  S* data;
  i64 layers, layer, block_size, heads, dim;

  // The elements of K or of V of one head in a block.
  INLINE i64 part_size() const { return block_size * row_size<S>(dim); }
  // The piece of the 16 tokens from `offset` (a multiple of 16) on.
  INLINE S* keys(i64 block, i64 head, i64 offset) const {
    return data + ((block * layers + layer) * heads + head) * 2 * part_size() + offset * row_size<S>(dim);
  }
  INLINE i64 value_tokens() const { return block_size % VALUE_TOKENS ? 16 : VALUE_TOKENS; }
  // The piece of V that contains token `offset`.
  INLINE S* value_piece(i64 block, i64 head, i64 offset) const {
    return keys(block, head, offset / value_tokens() * value_tokens()) + part_size();
  }
  INLINE Place<S> key(i64 slot, i64 head) const {
    return {keys(slot / block_size, head, slot % block_size / 16 * 16), slot % 16, dim};
  }
  INLINE ValuePlace<S> value(i64 slot, i64 head) const {
    const i64 offset = slot % block_size;
    return {value_piece(slot / block_size, head, offset), offset % value_tokens(), value_tokens(), dim};
  }
};

// One layer of a pool of latents: [block][layer], then rows in pieces of 16 tokens. K is the whole row, V its first
// v_dim elements.
template <class S>
struct Latent {
  using Stored = S;
  static constexpr bool latent = true;
  static constexpr i64 heads = 1;
  S* data;
  i64 layers, layer, block_size, dim, v_dim;

  INLINE S* keys(i64 block, i64, i64 offset) const {
    return data + ((block * layers + layer) * block_size + offset) * row_size<S>(dim);
  }
  INLINE Place<S> at(i64 slot) const {
    return {keys(slot / block_size, 0, slot % block_size / 16 * 16), slot % 16, dim};
  }
};

// positions [rows] -> cosines then sines, [rows, 2 * half], times `scaling`.
inline void rope_table(Team& team, const i64* positions, const float* inv_freq, float scaling, i64 rows, i64 half,
                       Rows<float> out) {
  team.each(rows, 8, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      for (i64 i = 0; i < half; ++i) {
        float angle = float(positions[row]) * inv_freq[i];
        out[row][i] = cosf(angle) * scaling;
        out[row][half + i] = sinf(angle) * scaling;
      }
  });
}

// The elements that form a pair, in x and in the result: see ops/rope.py.
enum Pairs { HALVES, NEIGHBOURS, NEIGHBOURS_TO_HALVES };

// Rotates one head; `out` may not be `x`.
template <class T>
INLINE void rope_head(const T* x, const float* table, i64 half, Pairs pairs, i64 dim, T* out) {
  if (pairs != HALVES) {
    for (i64 i = 0; i < half; ++i) {
      float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]), c = table[i], s = table[half + i];
      i64 first = pairs == NEIGHBOURS ? 2 * i : i, second = pairs == NEIGHBOURS ? 2 * i + 1 : i + half;
      from_float(out[first], a * c - b * s);
      from_float(out[second], b * c + a * s);
    }
  } else {
    each_vector(half, [&](i64 i, auto n) {
      Vec a = load(x + i, n), b = load(x + half + i, n), c = load(table + i, n), s = load(table + half + i, n);
      store(out + i, sub(mul(a, c), mul(b, s)), n);
      store(out + half + i, add(mul(b, c), mul(a, s)), n);
    });
  }
  if (dim > 2 * half) memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
}

// Applies the RMSNorm of a head, unless it has no weight, and then rope; `out` may not be `x`.
template <class T>
INLINE void norm_rope_head(const T* x, const T* weight, const Norm& norm, const float* table, i64 half, Pairs pairs,
                           i64 dim, T* out) {
  if (!weight) return rope_head(x, table, half, pairs, dim, out);
  // The same operations in registers, for heads of 2 * N vectors that are rotated as a whole.
  auto in_registers = [&]<int N>(std::integral_constant<int, N>) {
    Vec v[2 * N], squares = zero();
#pragma GCC unroll 16
    for (int i = 0; i < 2 * N; ++i) v[i] = load(x + i * LANES), squares = fma(v[i], v[i], squares);
    const Vec scale = set1(1.0f / sqrtf(sum(squares) / float(2 * N * LANES) + norm.eps));
#pragma GCC unroll 16
    for (int i = 0; i < 2 * N; ++i) {
      v[i] = mul(v[i], scale);
      if (norm.early) v[i] = rounded<T>(v[i]);
      v[i] = rounded<T>(mul(v[i], load(weight + i * LANES)));
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const Vec a = v[i], b = v[N + i], c = load(table + i * LANES), s = load(table + half + i * LANES);
      store(out + i * LANES, sub(mul(a, c), mul(b, s)));
      store(out + half + i * LANES, add(mul(b, c), mul(a, s)));
    }
  };
  if (pairs == HALVES && dim == 2 * half && norm.offset == 0.0f) {
    if (half == 2 * LANES) return in_registers(std::integral_constant<int, 2>());
    if (half == 4 * LANES) return in_registers(std::integral_constant<int, 4>());
  }
  T normed[MAX_HEAD_DIM];
  norm_row(x, weight, norm, dim, normed);
  rope_head(normed, table, half, pairs, dim, out);
}

// Returns the row to store: the row itself, or its int8 form made in `room`, whose scale it writes to its place.
template <class T, class S, class P>
INLINE const S* stored(const T* row, const P& place, S* room) {
  if constexpr (std::is_same_v<T, S>) {
    return row;
  } else {
    quantize_row(row, place.dim, room, place.scale());
    return room;
  }
}
template <class T, class S>
INLINE void write_key(const Cache<S>& cache, i64 slot, i64 head, const T* k) {
  constexpr i64 unit = Dot<S>::unit;
  S room[MAX_HEAD_DIM];
  const Place<S> to = cache.key(slot, head);
  const S* row = stored(k, to, room);
  for (i64 d = 0; d < cache.dim; d += unit) memcpy(to.unit(d), row + d, sizeof(S) * unit);
}
template <class T, class S>
INLINE void write_value(const Cache<S>& cache, i64 slot, i64 head, const T* v) {
  S room[MAX_HEAD_DIM];
  const ValuePlace<S> to = cache.value(slot, head);
  const S* row = stored(v, to, room);
  for (i64 d = 0; d < cache.dim; d += LANES) spread(row + d, to.line(d), to.lane());
}

// x, out [rows, heads * dim].
template <class T>
KERNEL void rope(Team& team, Rows<const T> x, Rows<const float> table, i64 half, Pairs pairs, i64 rows, i64 heads,
                 i64 dim, Rows<T> out) {
  team.each(rows * heads, row_grain(dim), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / heads, column = i % heads * dim;
      rope_head(x[row] + column, table[row], half, pairs, dim, out[row] + column);
    }
  });
}

// Prefetches the head of a row that is read a little later, since data that other threads wrote is slow to load.
template <class T>
INLINE void fetch_head(Rows<const T> x, i64 row, i64 rows, i64 column, i64 dim) {
  const char* next = reinterpret_cast<const char*>(x[row + 4 < rows ? row + 4 : row] + column);
  for (i64 at = 0; at < dim * i64(sizeof(T)); at += 64) fetch_l1(next + at);
}

// Calls f(row, head) for all rows and heads. One thread gets 16 consecutive rows of a head: they write the same lines
// of K.
template <class F>
INLINE void each_head(Team& team, i64 rows, i64 heads, i64 dim, F f) {
  const i64 blocks = (rows + 15) / 16;
  team.each(blocks * heads, (row_grain(dim) + 15) / 16, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i)
      for (i64 row = i / heads * 16; row < rows && row < i / heads * 16 + 16; ++row) f(row, i % heads);
  });
}

template <class T, class S>
KERNEL void kv_write(Team& team, Cache<S> cache, Rows<const T> k, Rows<const T> v, const i64* slots, i64 rows) {
  each_head(team, rows, cache.heads, cache.dim, [&](i64 row, i64 head) {
    write_key(cache, slots[row], head, k[row] + head * cache.dim);
    write_value(cache, slots[row], head, v[row] + head * cache.dim);
  });
}

template <class T, class S>
KERNEL void latent_write(Team& team, Latent<S> cache, Rows<const T> k, const i64* slots, i64 rows) {
  team.each(rows, row_grain(cache.dim), [&](i64 begin, i64 end) {
    S room[MAX_LATENT_DIM];
    for (i64 row = begin; row < end; ++row) {
      const Place<S> to = cache.at(slots[row]);
      memcpy(to.row(), stored(k[row], to, room), sizeof(S) * cache.dim);
    }
  });
}

// Applies rope to q [rows, heads * dim] into out, and to k on its way into the cache.
template <class T, class S>
KERNEL void rope_kv_write(Team& team, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const float> table,
                          i64 half, Pairs pairs, Cache<S> cache, const i64* slots, i64 rows, i64 heads, Rows<T> out) {
  const i64 dim = cache.dim;
  each_head(team, rows, heads + cache.heads, dim, [&](i64 row, i64 head) {
    if (head < heads) return rope_head(q[row] + head * dim, table[row], half, pairs, dim, out[row] + head * dim);
    head -= heads;
    T rotated[MAX_HEAD_DIM];
    rope_head(k[row] + head * dim, table[row], half, pairs, dim, rotated);
    write_key(cache, slots[row], head, rotated);
    write_value(cache, slots[row], head, v[row] + head * dim);
  });
}

// Applies an RMSNorm to every head of q and of k, and then rope as above.
template <class T, class S>
KERNEL void norm_rope_kv_write(Team& team, Rows<const T> q, Rows<const T> k, Rows<const T> v, const T* q_weight,
                               const T* k_weight, Norm norm, Rows<const float> table, i64 half, Pairs pairs,
                               Cache<S> cache, const i64* slots, i64 rows, i64 heads, Rows<T> out) {
  const i64 dim = cache.dim;
  each_head(team, rows, heads + cache.heads, dim, [&](i64 row, i64 head) {
    T rotated[MAX_HEAD_DIM];
    if (head < heads) {
      fetch_head(q, row, rows, head * dim, dim);
      return norm_rope_head(q[row] + head * dim, q_weight, norm, table[row], half, pairs, dim, out[row] + head * dim);
    }
    head -= heads;
    fetch_head(k, row, rows, head * dim, dim);
    fetch_head(v, row, rows, head * dim, dim);
    norm_rope_head(k[row] + head * dim, k_weight, norm, table[row], half, pairs, dim, rotated);
    write_key(cache, slots[row], head, rotated);
    write_value(cache, slots[row], head, v[row] + head * dim);
  });
}

// The destination of the heads of q, k and v that a projection gives: q's are rotated into out, k's and v's go into the
// cache. The heads of q and k are normed first if they have weights.
template <class T, class S>
struct Heads {
  const T *q_weight, *k_weight;
  Norm norm;
  Rows<const float> table;
  i64 half;
  Pairs pairs;
  Cache<S> cache;
  const i64* slots;
  i64 rows, heads;
  Rows<T> out;

  INLINE i64 count() const { return heads + 2 * cache.heads; }
  INLINE void operator()(i64 row, i64 head, const T* value) const {
    const i64 of_k = head - heads, of_v = of_k - cache.heads;
    if (of_v >= 0) return write_value(cache, slots[row], of_v, value);
    T rotated[MAX_HEAD_DIM];
    T* to = of_k < 0 ? out[row] + head * cache.dim : rotated;
    norm_rope_head(value, of_k < 0 ? q_weight : k_weight, norm, table[row], half, pairs, cache.dim, to);
    if (of_k >= 0) write_key(cache, slots[row], of_k, rotated);
  }
};

// The panels of a head, multiplied by rows of X.
template <class X, class W, class R, class E>
INLINE void head_panels(const Panels<W>& w, i64 begin, i64 end, i64 after, i64 rows, R row_of, E emit) {
  gemm_panels<X>(w, begin, end, after, rows, row_of, emit);
}
template <class X, class R, class E>
INLINE void head_panels(const Int4Panels& w, i64 begin, i64 end, i64 after, i64 rows, R row_of, E emit) {
  int4_panels(w, begin, end, after, rows, row_of, emit);
}

// Multiplies x by the weight of all heads of q, k and v, and finishes each head where it is computed.
template <class X, class P, class F, class T, class S>
INLINE void project_heads(Team& team, Rows<const X> x, const P& panels, F number, const Heads<T, S>& finish,
                          bool fetches) {
  const i64 dim = finish.cache.dim, of_head = dim / 16, all = finish.count();
  const P w = panels.for_rows(finish.rows);
  const RowBlocks row_blocks = row_blocks_of<X>(finish.rows, *w.blocking);
  const i64 blocks = row_blocks.count();
  const bool early = blocks == 1 && fetches;
  team.each_early(all * blocks, piece_grain(team, all * blocks), early, [&](i64 begin, i64 end, i64 after) {
    alignas(64) T projected[(AMX ? TILE_BLOCK_ROWS : BLOCK_ROWS) * MAX_HEAD_DIM];
    for (i64 item = begin; item < end; ++item) {
      const i64 block = item / all, head = item % all, next = item + 1 < end ? item + 1 : after;
      const i64 row0 = row_blocks.begin(block), row1 = row_blocks.begin(block + 1);
      head_panels<X>(
          w, head * of_head, (head + 1) * of_head, early && next < all ? next * of_head : -1, row1 - row0,
          [&](i64 row) { return x[row0 + row]; },
          [=, to = projected - head * dim](i64 row, i64 panel, auto acc) {
            store(to + row * dim + panel * 16, number(acc, row0 + row, panel * 16));
          });
      for (i64 row = row0; row < row1; ++row) finish(row, head, projected + (row - row0) * dim);
    }
  });
}

template <class T, class S>
KERNEL void qkv_rope_kv_write(Team& team, Rows<const T> x, Panels<T> w, const T* bias, Heads<T, S> finish) {
  project_heads(team, x, w, FromSums<T>{nullptr, bias}, finish, fetches_weights<T, T>(finish.rows));
}
template <class T, class S>
KERNEL void qkv_rope_kv_write_int8(Team& team, Rows<const T> x, Panels<i8> w, const float* scale, const T* bias,
                                   Heads<T, S> finish) {
  project_heads(team, x, w, FromSums<T>{scale, bias}, finish, fetches_weights<T, i8>(finish.rows));
}
template <class T, class S>
KERNEL void qkv_rope_kv_write_w8a8(Team& team, Rows<const i8> x, Rows<const float> x_scale, Panels<i8> w,
                                   const float* scale, const T* bias, Heads<T, S> finish) {
  project_heads(team, x, w, FromIntegers<T>{x_scale, scale, bias}, finish, fetches_weights<i8, i8>(finish.rows));
}
template <class T, class S>
KERNEL void qkv_rope_kv_write_w4a8(Team& team, Rows<const i8> x, Rows<const float> x_scale, Int4Panels w,
                                   const float* scale, const T* bias, Heads<T, S> finish) {
  project_heads(team, x, w, FromIntegers<T>{x_scale, scale, bias}, finish, fetches_int4(finish.rows));
}

template <class S, class P>
INLINE void copy_scale(const P& from, const P& to) {
  if constexpr (std::is_same_v<S, i8>) *to.scale() = *from.scale();
}

// Copies a head of one slot to another, in one layer.
template <class S>
INLINE void copy_slot(const Cache<S>& cache, i64 source, i64 target, i64 head) {
  const Place<S> from = cache.key(source, head), to = cache.key(target, head);
  for (i64 d = 0; d < cache.dim; d += Dot<S>::unit) memmove(to.unit(d), from.unit(d), sizeof(S) * Dot<S>::unit);
  copy_scale<S>(from, to);
  const ValuePlace<S> value = cache.value(source, head), copy = cache.value(target, head);
  value.each([&](S x, i64 d) { copy.line(d / 16 * 16)[d % 16 * Dot<S>::unit + copy.lane()] = x; });
  copy_scale<S>(value, copy);
}
template <class S>
INLINE void copy_slot(const Latent<S>& cache, i64 source, i64 target, i64) {
  const Place<S> from = cache.at(source), to = cache.at(target);
  memmove(to.row(), from.row(), sizeof(S) * from.dim);
  copy_scale<S>(from, to);
}

// Copies slot source[i] to slot target[i], in order, in every layer.
template <class C>
void copy_slots(C cache, const i64* source, const i64* target, i64 count) {
  for (i64 i = 0; i < count; ++i)
    for (cache.layer = 0; cache.layer < cache.layers; ++cache.layer)
      for (i64 head = 0; head < cache.heads; ++head) copy_slot(cache, source[i], target[i], head);
}

// The slots that a layer copies when it has written its K and V, see StepArgs.
struct Echoes {
  const i64 *source = nullptr, *target = nullptr;
  i64 count = 0;
};
template <class C>
INLINE void echo_slots(Team& team, const C& cache, const Echoes& echoes) {
  team.each(echoes.count * cache.heads, row_grain(cache.dim), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i)
      copy_slot(cache, echoes.source[i / cache.heads], echoes.target[i / cache.heads], i % cache.heads);
  });
  team.barrier();
}

// Copies `count` elements from a pool to the canonical form, or back.
template <bool PACK, class S>
INLINE void move(S* pool, S* canonical, i64 count) {
  if (PACK) memcpy(canonical, pool, sizeof(S) * count);
  else memcpy(pool, canonical, sizeof(S) * count);
}
template <bool PACK, class S, class P>
INLINE void move_scale(const P& place, S* canonical) {
  if constexpr (std::is_same_v<S, i8>) move<PACK>(reinterpret_cast<S*>(place.scale()), canonical, sizeof(float));
}

// Copies canonical [count, layers, 2, block_size, heads, row_size] from the pool's blocks or into them.
template <class S, bool PACK>
void move_blocks(Cache<S> cache, const i32* blocks, i64 count, S* canonical) {
  const i64 size = row_size<S>(cache.dim);
  for (i64 i = 0; i < count; ++i)
    for (cache.layer = 0; cache.layer < cache.layers; ++cache.layer)
      for (int which = 0; which < 2; ++which)
        for (i64 slot = blocks[i] * cache.block_size; slot < (blocks[i] + 1) * cache.block_size; ++slot)
          for (i64 head = 0; head < cache.heads; ++head, canonical += size) {
            if (which) {
              const ValuePlace<S> value = cache.value(slot, head);
              value.each([&](S& x, i64 d) { move<PACK>(&x, canonical + d, 1); });
              move_scale<PACK>(value, canonical + cache.dim);
              continue;
            }
            const Place<S> key = cache.key(slot, head);
            for (i64 d = 0; d < cache.dim; d += Dot<S>::unit) move<PACK>(key.unit(d), canonical + d, Dot<S>::unit);
            move_scale<PACK>(key, canonical + cache.dim);
          }
}
// Copies canonical [count, layers, 1, block_size, 1, row_size] from the blocks of latents or into them.
template <class S, bool PACK>
void move_blocks(Latent<S> cache, const i32* blocks, i64 count, S* canonical) {
  const i64 size = row_size<S>(cache.dim);
  for (i64 i = 0; i < count; ++i)
    for (cache.layer = 0; cache.layer < cache.layers; ++cache.layer)
      for (i64 slot = blocks[i] * cache.block_size; slot < (blocks[i] + 1) * cache.block_size;
           ++slot, canonical += size) {
        const Place<S> place = cache.at(slot);
        move<PACK>(place.row(), canonical, place.dim);
        move_scale<PACK>(place, canonical + place.dim);
      }
}

}  // namespace inferc
