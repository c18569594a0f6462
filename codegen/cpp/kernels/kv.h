// Rope and the paged K,V pool.
// A block holds every layer of its group; in a layer first K, then V. K lies in panels like a weight, so that q @ K.T is
// the same multiplication: [kv_head][block_size / 16][head_dim / unit][16 tokens][unit]. V: [kv_head][block_size][head_dim].
#pragma once
#include "rows.h"

namespace inferc {

// One layer of a group's pool.
template <class T>
struct Cache {
  T* data;
  i64 layers, layer, block_size, heads, dim;

  INLINE i64 part_size() const { return heads * block_size * dim; }
  INLINE T* part(i64 block, int which) const { return data + ((block * layers + layer) * 2 + which) * part_size(); }
  // The 16 tokens from `offset` (a multiple of 16) on, as a panel over head_dim.
  INLINE T* keys(i64 block, i64 head, i64 offset) const { return part(block, 0) + (head * block_size + offset) * dim; }
  INLINE T* values(i64 block, i64 head, i64 offset) const { return part(block, 1) + (head * block_size + offset) * dim; }
  INLINE T* key_element(i64 block, i64 head, i64 offset, i64 d) const {
    constexpr i64 unit = Dot<T>::unit;
    return keys(block, head, offset / 16 * 16) + d / unit * 16 * unit + offset % 16 * unit + d % unit;
  }
};

// One layer of a pool that holds latents: [block][layer][block_size][dim]. K is the whole of it, V its first v_dim elements.
template <class T>
struct Latent {
  static constexpr i64 heads = 1;
  T* data;
  i64 layers, layer, block_size, dim, v_dim;

  INLINE T* row(i64 block, i64 offset) const { return data + ((block * layers + layer) * block_size + offset) * dim; }
  INLINE const T* keys(i64 block, i64, i64 offset) const { return row(block, offset); }
  INLINE const T* values(i64 block, i64, i64 offset) const { return row(block, offset); }
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

// Which elements are a pair, of x and of the result: see ops/rope.py.
enum Pairs { HALVES, NEIGHBOURS, NEIGHBOURS_TO_HALVES };

// One head: out may not be x.
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
    for (i64 i = 0; i < half; i += LANES) {
      i64 n = half - i;
      Vec a = load(x + i, n), b = load(x + half + i, n), c = load(table + i, n), s = load(table + half + i, n);
      store(out + i, sub(mul(a, c), mul(b, s)), n);
      store(out + half + i, add(mul(b, c), mul(a, s)), n);
    }
  }
  if (dim > 2 * half) memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
}

template <class T>
INLINE void write_key(const Cache<T>& cache, i64 slot, i64 head, const T* k) {
  constexpr i64 unit = Dot<T>::unit;
  T* to = cache.key_element(slot / cache.block_size, head, slot % cache.block_size, 0);
  for (i64 d = 0; d < cache.dim; d += unit) memcpy(to + d * 16, k + d, sizeof(T) * unit);
}
template <class T>
INLINE void write_value(const Cache<T>& cache, i64 slot, i64 head, const T* v) {
  memcpy(cache.values(slot / cache.block_size, head, slot % cache.block_size), v, sizeof(T) * cache.dim);
}

// x, out [rows, heads * dim].
template <class T>
void rope(Team& team, Rows<const T> x, Rows<const float> table, i64 half, Pairs pairs, i64 rows, i64 heads, i64 dim,
          Rows<T> out) {
  team.each(rows * heads, row_grain(dim), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / heads, column = i % heads * dim;
      rope_head(x[row] + column, table[row], half, pairs, dim, out[row] + column);
    }
  });
}

template <class T>
void kv_write(Team& team, Cache<T> cache, Rows<const T> k, Rows<const T> v, const i64* slots, i64 rows) {
  team.each(rows * cache.heads, row_grain(cache.dim), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / cache.heads, head = i % cache.heads;
      write_key(cache, slots[row], head, k[row] + head * cache.dim);
      write_value(cache, slots[row], head, v[row] + head * cache.dim);
    }
  });
}

template <class T>
void latent_write(Team& team, Latent<T> cache, Rows<const T> k, const i64* slots, i64 rows) {
  team.each(rows, row_grain(cache.dim), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      memcpy(cache.row(slots[row] / cache.block_size, slots[row] % cache.block_size), k[row], sizeof(T) * cache.dim);
  });
}

constexpr i64 MAX_HEAD_DIM = 512;

// rope on q [rows, heads * dim] into out, and on k on its way into the cache.
template <class T>
void rope_kv_write(Team& team, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const float> table, i64 half,
                   Pairs pairs, Cache<T> cache, const i64* slots, i64 rows, i64 heads, Rows<T> out) {
  i64 dim = cache.dim, all = heads + cache.heads;
  team.each(rows * all, row_grain(dim), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / all, head = i % all;
      if (head < heads) {
        rope_head(q[row] + head * dim, table[row], half, pairs, dim, out[row] + head * dim);
      } else {
        head -= heads;
        T rotated[MAX_HEAD_DIM];
        rope_head(k[row] + head * dim, table[row], half, pairs, dim, rotated);
        write_key(cache, slots[row], head, rotated);
        write_value(cache, slots[row], head, v[row] + head * dim);
      }
    }
  });
}

// The same after an RMSNorm of every head of q and of k.
template <class T>
void norm_rope_kv_write(Team& team, Rows<const T> q, Rows<const T> k, Rows<const T> v, const T* q_weight,
                        const T* k_weight, Norm norm, Rows<const float> table, i64 half, Pairs pairs, Cache<T> cache,
                        const i64* slots, i64 rows, i64 heads, Rows<T> out) {
  i64 dim = cache.dim, all = heads + cache.heads;
  team.each(rows * all, row_grain(dim), [&](i64 begin, i64 end) {
    T normed[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / all, head = i % all;
      if (head < heads) {
        norm_row(q[row] + head * dim, q_weight, norm, dim, normed);
        rope_head(normed, table[row], half, pairs, dim, out[row] + head * dim);
      } else {
        head -= heads;
        norm_row(k[row] + head * dim, k_weight, norm, dim, normed);
        rope_head(normed, table[row], half, pairs, dim, rotated);
        write_key(cache, slots[row], head, rotated);
        write_value(cache, slots[row], head, v[row] + head * dim);
      }
    }
  });
}

// x times the weight of all heads of q, k and v, each head finished where it is computed: q into out, k and v into the
// cache. Heads of q and k are normed first if they have weights.
template <class T>
void qkv_rope_kv_write(Team& team, Rows<const T> x, Panels<T> w, const T* bias, const T* q_weight, const T* k_weight,
                       Norm norm, Rows<const float> table, i64 half, Pairs pairs, Cache<T> cache, const i64* slots,
                       i64 rows, i64 heads, Rows<T> out) {
  const i64 dim = cache.dim, of_head = dim / 16, all = heads + 2 * cache.heads;
  const i64 blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  team.each(all * blocks, 1, [&](i64 item, i64) {
    i64 block = item / all, head = item % all;
    i64 row0 = rows * block / blocks, row1 = rows * (block + 1) / blocks;
    T projected[BLOCK_ROWS * MAX_HEAD_DIM];
    gemm_panels<T>(
        w, head * of_head, (head + 1) * of_head, row1 - row0, [&](i64 row) { return x[row0 + row]; },
        [&](i64 row, i64 panel, Vec acc) {
          if (bias) acc = add(acc, load(bias + panel * 16));
          store(projected + row * dim + (panel - head * of_head) * 16, acc);
        });
    const bool is_q = head < heads, is_k = !is_q && head < heads + cache.heads;
    const T* weight = is_q ? q_weight : k_weight;
    T normed[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
    for (i64 row = row0; row < row1; ++row) {
      const T* value = projected + (row - row0) * dim;
      if (!is_q && !is_k) {
        write_value(cache, slots[row], head - heads - cache.heads, value);
        continue;
      }
      if (weight) norm_row(value, weight, norm, dim, normed), value = normed;
      rope_head(value, table[row], half, pairs, dim, is_q ? out[row] + head * dim : rotated);
      if (is_k) write_key(cache, slots[row], head - heads, rotated);
    }
  });
}

// Slot source[i] to slot target[i], in order, in every layer.
template <class T>
void copy_slots(Cache<T> cache, const i64* source, const i64* target, i64 count) {
  for (i64 i = 0; i < count; ++i)
    for (cache.layer = 0; cache.layer < cache.layers; ++cache.layer)
      for (i64 head = 0; head < cache.heads; ++head) {
        i64 from = source[i] / cache.block_size, to = target[i] / cache.block_size;
        i64 offset = source[i] % cache.block_size, landing = target[i] % cache.block_size;
        for (i64 d = 0; d < cache.dim; ++d)
          *cache.key_element(to, head, landing, d) = *cache.key_element(from, head, offset, d);
        memmove(cache.values(to, head, landing), cache.values(from, head, offset), sizeof(T) * cache.dim);
      }
}

// canonical [count, layers, 2, block_size, heads, dim], from the pool's blocks or into them.
template <class T, bool PACK>
void move_blocks(Cache<T> cache, const i32* blocks, i64 count, T* canonical) {
  for (i64 i = 0; i < count; ++i)
    for (cache.layer = 0; cache.layer < cache.layers; ++cache.layer)
      for (int which = 0; which < 2; ++which)
        for (i64 offset = 0; offset < cache.block_size; ++offset)
          for (i64 head = 0; head < cache.heads; ++head)
            for (i64 d = 0; d < cache.dim; ++d, ++canonical) {
              T* cell = which ? cache.values(blocks[i], head, offset) + d : cache.key_element(blocks[i], head, offset, d);
              if (PACK) *canonical = *cell;
              else *cell = *canonical;
            }
}

template <class T>
void copy_slots(Latent<T> cache, const i64* source, const i64* target, i64 count) {
  for (i64 i = 0; i < count; ++i)
    for (cache.layer = 0; cache.layer < cache.layers; ++cache.layer)
      memmove(cache.row(target[i] / cache.block_size, target[i] % cache.block_size),
              cache.row(source[i] / cache.block_size, source[i] % cache.block_size), sizeof(T) * cache.dim);
}

// canonical [count, layers, 1, block_size, 1, dim].
template <class T, bool PACK>
void move_blocks(Latent<T> cache, const i32* blocks, i64 count, T* canonical) {
  const i64 size = cache.layers * cache.block_size * cache.dim;
  for (i64 i = 0; i < count; ++i, canonical += size) {
    T* block = cache.data + blocks[i] * size;
    if (PACK) memcpy(canonical, block, size * sizeof(T));
    else memcpy(block, canonical, size * sizeof(T));
  }
}

}  // namespace inferc
