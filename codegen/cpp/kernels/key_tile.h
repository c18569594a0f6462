// A tile of keys: where its keys and values are in the KV pool, and its operations: scores, softmax, and the sums of
// the values. Both products are those of a weight, with pieces of the pool as its panels, and add up in the same order.
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
#pragma once
#include "kv.h"

namespace inferc {

// On tiles, a larger tile of keys amortises the work of vectors over more keys, and sums are loaded and stored less
// often.
constexpr i64 KEY_TILE = AMX ? 128 : 64;
constexpr int PIECES = KEY_TILE / 16, STEPS = KEY_TILE / VALUE_TOKENS;  // of 16 keys, of 32 values
constexpr int NARROW_ROWS = TALL_ROWS ? 6 : 4;  // up to so many rows, keys in int8 are widened in registers
constexpr float MINUS_INF = -__builtin_inff();

template <class T>
constexpr bool ON_TILES = AMX && std::is_same_v<T, bf16>;

// The pieces of a tile's keys, and the same 16 tokens in its values: of a piece of V, its panels `apart` elements
// apart, or of latents, their rows. After the sequence's end the pointers are to any piece.
template <class S>
struct Tile {
  const S *keys[PIECES], *values[PIECES];
  const float *key_scales[PIECES], *value_scales[PIECES];  // if S is int8
  i64 dim, apart, keys_there;  // dim: of a key; keys_there: how many of the tile's keys exist
  INLINE i64 count() const { return (keys_there + 15) / 16; }  // the number of pieces that hold keys
  INLINE const S* panel(i64 p, i64 d) const { return values[p] + d / 16 * apart; }
};

template <class S>
INLINE Tile<S> tile_of(const Cache<S>& cache, const i32* blocks, i64 head, i64 key, i64 key_end) {
  Tile<S> tile;
  const i64 tokens = cache.value_tokens();
  tile.dim = cache.dim;
  tile.apart = tokens * 16;
  tile.keys_there = key_end - key < KEY_TILE ? key_end - key : KEY_TILE;
  for (i64 p = 0; p < PIECES; ++p) {
    const i64 token = key + p * 16 < key_end ? key + p * 16 : key, offset = token % cache.block_size;
    const S* values = cache.value_piece(blocks[token / cache.block_size], head, offset);
    tile.keys[p] = cache.keys(blocks[token / cache.block_size], head, offset);
    tile.values[p] = values + offset % tokens * 16;
    tile.key_scales[p] = reinterpret_cast<const float*>(tile.keys[p] + 16 * cache.dim);
    tile.value_scales[p] = reinterpret_cast<const float*>(values + tokens * cache.dim) + offset % tokens;
  }
  return tile;
}
template <class S>
INLINE Tile<S> tile_of(const Latent<S>& cache, const i32* blocks, i64 head, i64 key, i64 key_end) {
  Tile<S> tile;
  tile.dim = cache.dim;
  tile.apart = 0;
  tile.keys_there = key_end - key < KEY_TILE ? key_end - key : KEY_TILE;
  for (i64 p = 0; p < PIECES; ++p) {
    const i64 token = key + p * 16 < key_end ? key + p * 16 : key;
    tile.keys[p] = tile.values[p] = cache.keys(blocks[token / cache.block_size], head, token % cache.block_size);
    tile.key_scales[p] = tile.value_scales[p] = reinterpret_cast<const float*>(tile.keys[p] + 16 * cache.dim);
  }
  return tile;
}

// Multiplies the products of q with 16 keys, or probabilities of 16 values, by the scales of these keys or values.
template <class S>
INLINE Vec by_scales(Vec x, const float* scales) {
  if constexpr (!std::is_same_v<S, i8>) return x;
  else return mul(x, load(scales));
}

// A range [first, last) of a tile's pieces, or of its keys.
struct Range {
  i64 first, last;
  // The range of parts of `size` that contains this one.
  INLINE Range in(i64 size) const { return {first / size, (last + size - 1) / size}; }
  INLINE Range times(i64 count) const { return {first * count, last * count}; }
  // The smallest range in whole groups of `count` that contains this one.
  INLINE Range rounded_to(i64 count) const { return {first / count * count, (last + count - 1) / count * count}; }
};

// Prefetches `count` elements into the second-level cache. The next tile goes there meanwhile, because the second level
// can wait for more lines at a time than the first.
template <class S>
INLINE void fetch_elements(const S* from, i64 count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (i64 at = 0; at < count * i64(sizeof(S)); at += 64) fetch_l2(bytes + at);
}

// Makes a panel of 16 latents, with the layout of K in a Cache, and prefetches those of the next tile.
template <class T, class S>
INLINE void pack_keys(const S* rows, const S* next, i64 dim, T* panel) {
  constexpr i64 unit = Dot<T>::unit;
  T wide[MAX_LATENT_DIM];
  for (i64 token = 0; token < 16; ++token) {
    const S* stored = rows + token * dim;
    const T* row = wide;
    if (next) fetch_elements(next + token * dim, dim);
    if constexpr (std::is_same_v<T, S>) row = stored;
    else
      for (i64 d = 0; d < dim; d += LANES) store(wide + d, load(stored + d));
    for (i64 d = 0; d < dim; d += unit) memcpy(panel + d * 16 + token * unit, row + d, sizeof(T) * unit);
  }
}

// Widens 16 keys in int8 to a panel in T, and prefetches those of the next tile.
template <class T>
INLINE void widen_keys(const i8* piece, const i8* next, i64 dim, T* panel) {
  for (i64 at = 0; at < 16 * dim; at += 64) {
    if (next) fetch_l2(next + at);
    widen_line(piece + at, panel + at);
  }
}

// A tile's keys as panels in T: in the pool, or in room for them.
template <class T, class C>
struct KeyPanels {
  using S = typename C::Stored;
  static constexpr bool in_place = !C::latent && std::is_same_v<T, S>;
  const T* panels[PIECES];
  alignas(64) T room[in_place ? 1 : KEY_TILE * (C::latent ? MAX_LATENT_DIM : MAX_HEAD_DIM)];

  INLINE void read(const Tile<S>& tile, const Tile<S>* next, Range pieces) {
    for (i64 p = pieces.first; p < pieces.last; ++p) {
      if constexpr (in_place) {
        panels[p] = tile.keys[p];
      } else {
        T* panel = room + p * 16 * tile.dim;
        const S* ahead = next ? next->keys[p] : nullptr;
        if constexpr (C::latent) pack_keys(tile.keys[p], ahead, tile.dim, panel);
        else widen_keys(tile.keys[p], ahead, tile.dim, panel);
        panels[p] = panel;
      }
    }
  }
};

// A tile's values as panels over 32 of its keys, [v_dim / 16][32 / unit][16][unit] in T: in the pool, or in room for
// them.
template <class T, class C>
struct ValuePanels {
  using S = typename C::Stored;
  static constexpr bool direct = !C::latent && std::is_same_v<T, S>;
  static constexpr i64 unit = Dot<T>::unit, panel = VALUE_TOKENS * 16;
  const T* steps[STEPS];
  alignas(64) T room[KEY_TILE * MAX_HEAD_DIM];

  INLINE static bool lies_so(const Tile<S>& tile) { return direct && tile.apart == panel; }

  // Copies the values of the keys `there`, and zeros for others: their places may be in block 0, with any data, and 0 *
  // NaN is NaN.
  INLINE void read(const Tile<S>& tile, const Tile<S>* next, Range there, i64 v_dim) {
    for (i64 step = there.first / VALUE_TOKENS; step * VALUE_TOKENS < there.last; ++step) {
      const i64 key = step * VALUE_TOKENS;
      if constexpr (direct)
        if (lies_so(tile) && there.first <= key && key + VALUE_TOKENS <= there.last) {
          steps[step] = tile.values[2 * step];
          continue;
        }
      T* to = room + key * v_dim;
      for (i64 half = 0; half < 2; ++half)
        copy(tile, next, 2 * step + half, {there.first - key - 16 * half, there.last - key - 16 * half}, v_dim,
             to + half * 256);
      steps[step] = to;
    }
  }

 private:
  // Copies piece p; `to` is its part of the first panel.
  INLINE void copy(const Tile<S>& tile, const Tile<S>* next, i64 p, Range there, i64 v_dim, T* to) {
    constexpr i64 group = C::latent || direct ? unit : Dot<i8>::unit;  // tokens that are copied at a time
    for (i64 d = 0; d < v_dim; d += 16, to += panel)
      for (i64 token = 0; token < 16; token += group) {
        T* line = to + token * 16;
        if (token + group <= there.first || token >= there.last) {
          memset(static_cast<void*>(line), 0, sizeof(T) * group * 16);
          continue;
        }
        if constexpr (C::latent) {
          const S* rows[unit];
          for (i64 u = 0; u < unit; ++u) rows[u] = tile.values[p] + (token + u) * tile.dim;
          Dot<T>::put(line, Dot<T>::right(rows, d));
        } else {
          const i64 at = token * 16;
          if (next) fetch_l2(next->panel(p, d) + at);
          if constexpr (direct) memcpy(line, tile.panel(p, d) + at, sizeof(T) * group * 16);
          else widen_line(tile.panel(p, d) + at, line);
        }
        for (i64 u = 0; u < group; ++u)
          if (token + u < there.first || token + u >= there.last) drop(line + u / unit * unit * 16, u % unit);
      }
  }
  // Writes zeros for the token at `lane` of a line.
  INLINE static void drop(T* line, i64 lane) {
    if constexpr (unit == 1) return store(line, zero());
    else if (lane == 0) store(static_cast<void*>(line), left_by<16>(zeros_right_by<16>(iload(line))));
    else store(static_cast<void*>(line), zeros_right_by<16>(left_by<16>(iload(line))));
  }
};

// Computes scores [rows][KEY_TILE] = q @ K.T of `pieces` of panels in T; row_of(r) is q's row r. It prefetches the
// panels `ahead` meanwhile unless that is null.
template <class T, class R>
INLINE void score_panels(const T* const* panels, const T* const* ahead, Range pieces, i64 rows, R row_of, i64 dim,
                         float* scores) {
  row_tiles(rows, TILE_ROWS, [&](i64 row, i64 height) {
    const T* left[TILE_ROWS];
    for (i64 m = 0; m < height; ++m) left[m] = row_of(row + m);
    for (i64 p = pieces.first; p < pieces.last; p += TILE_PANELS)
      multiply<T, TILE_PANELS>(height, left, panels + p, {ahead ? ahead + p : nullptr}, dim,
                               scores + row * KEY_TILE + p * LANES, KEY_TILE, true);
  });
}

// Computes these scores on tiles, for at most 32 rows that `pack_rows` packed, from `row` on.
template <class T>
INLINE void score_packed(const T* packed, i64 row, i64 dim, const T* const* panels, const T* const* ahead, Range pieces,
                         i64 height, float* scores) {
  constexpr i64 K = TILE_K<T>;
  alignas(64) T last_tiles[2 * TILE_HEIGHT * K];
  const T* last[2] = {last_tiles, last_tiles + TILE_HEIGHT * K};
  const RowTiles a = packed_tiles(packed, row / TILE_HEIGHT, dim, K);
  for (i64 p = pieces.first; p < pieces.last; p += 2) {
    TileAhead next;
    if (ahead)
      next = {reinterpret_cast<const char*>(ahead[p]), reinterpret_cast<const char*>(ahead[p + 1]), TILE_BYTES};
    for (int i = 0; i < 2; ++i)
      if (dim % K) last_tile(panels[p + i], dim, last_tiles + i * TILE_HEIGHT * K);
    tile_product<T, PANELS>(height, a, 2, panels + p, last, next, dim, nullptr, scores + p * LANES, KEY_TILE);
  }
}

// Computes these scores for at most M rows with a tile in int8, widened in registers, P panels at a time.
template <class T, int M, int P, class R>
INLINE void score_int8(const Tile<i8>& tile, const Tile<i8>& next, Range pieces, i64 rows, R row_of, float* scores) {
  const T* left[M];
  for (i64 m = 0; m < rows; ++m) left[m] = row_of(m);
  for (i64 p = pieces.first; p < pieces.last; p += P)
    int8_multiply<T, M, P>(rows, left, tile.keys + p, next.keys + p, tile.dim, scores + p * LANES, KEY_TILE, true);
}

// Makes scores of the products of q and keys. Without a softcap they are multiplied late, by `unit`, which is positive.
struct Scores {
  float scale, softcap;  // softcap 0: none
  INLINE float unit() const { return softcap != 0.0f ? 1.0f : scale; }
  // Makes values, still to be multiplied by `unit`, of the products of q and keys.
  INLINE Vec capped(Vec x) const {
    return softcap != 0.0f ? mul(tanh(div(mul(x, set1(scale)), set1(softcap))), set1(softcap)) : x;
  }
  // Makes the values of a tile's keys from 16 * p on, which do not depend on their positions.
  INLINE Vec score(Vec x, int) const { return capped(x); }
};

// The bias of a score: none.
struct NoBias {
  static constexpr bool present = false;
};
// The ALiBi bias of a score: each head's slope times the distance from the query to the key.
// Source: Press et al. 2022, arXiv:2108.12409.
struct Alibi {
  static constexpr bool present = true;
  const float* slopes;  // [num_heads]
};

// The scores of one row with ALiBi. first: the distance of the tile's first key; whole numbers, which float32 holds
// exactly.
struct BiasedScores {
  float scale, slope, first;
  INLINE float unit() const { return 1.0f; }
  INLINE Vec score(Vec x, int p) const {
    alignas(64) static constexpr float lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return fma(x, set1(scale), mul(set1(slope), add(load(lanes), set1(first + float(p * LANES)))));
  }
};

// Turns scores into probabilities: e^((x - top) * unit) in T. For bfloat16, with 8 bits of precision, 2^x within 3e-6
// is enough, and probabilities below 2^-100 become 2^-100, which is nothing beside the 1 of the highest score: so
// neither they, nor their products with a value and its scale, are denormal, which would stall a processor.
template <class T>
struct Probability {
  Vec top, unit;
  INLINE Probability(float top_, float unit_) {
    const float base = top_ == MINUS_INF ? 0.0f : top_;
    if constexpr (std::is_same_v<T, bf16>) {
      const float octaves = unit_ * 1.44269504088896341f;
      top = set1(-base * octaves), unit = set1(octaves);
    } else {
      top = set1(base), unit = set1(unit_);
    }
  }
  INLINE Vec operator()(Vec x) const {
    if constexpr (!std::is_same_v<T, bf16>) return exp(mul(sub(x, top), unit));
    const Vec power = max(set1(-100.0f), fma(x, unit, top));
    const Vec n = nearest(power), r = sub(power, n);
    Vec p = set1(9.582852945e-3f);
    p = fma(p, r, set1(5.590642616e-2f));
    p = fma(p, r, set1(2.402409911e-1f));
    p = fma(p, r, set1(6.931241751e-1f));
    p = fma(p, r, set1(1.0f));
    return scale2(p, n);
  }
};

// Turns one row of scores of a tile's first N pieces into probabilities in T, times the values' scales; MASKED: keys
// outside [low, high) of the tile do not count. top: the highest score so far, before it is multiplied by `unit`. It
// adds them to total [16], and returns the factor for the previous sums: 1 where there were none.
template <class T, bool MASKED, int N, class S, class O>
INLINE float softmax_row(const Tile<S>& tile, const float* scores, i64 low, i64 high, const O& of, float& top,
                         float* total, T* probabilities) {
  auto seen = [&](Vec x, int p, Vec other) {
    return MASKED ? keep(x, int(low) - p * LANES, int(high) - p * LANES, other) : x;
  };
  Vec s[N], tile_top = set1(MINUS_INF);
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) {
    s[p] = of.score(by_scales<S>(load(scores + p * LANES), tile.key_scales[p]), p);
    s[p] = seen(s[p], p, set1(MINUS_INF));
    tile_top = max(tile_top, s[p]);
  }
  float factor = 1.0f;
  Vec sum = load(total);
  if (lanes_less(set1(top), tile_top)) {  // rarer with every tile
    const float before = top;
    top = maximum(tile_top);
    if (before != MINUS_INF) factor = exp((before - top) * of.unit());
    sum = mul(sum, set1(factor));
  }
  const Probability<T> probability(top, of.unit());
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) {
    s[p] = seen(probability(s[p]), p, zero());
    sum = add(sum, s[p]);
    T* to = probabilities + p * LANES;
    if constexpr (std::is_same_v<S, i8>) store(to, seen(by_scales<S>(s[p], tile.value_scales[p]), p, zero()));
    else store_normal(to, s[p]);
  }
  store(total, sum);
  return factor;
}

// Computes acc [up to 32 rows, v_dim] += probabilities [rows][KEY_TILE] @ `steps` of the values, from zero if `fresh`,
// on tiles: M tiles of rows times P panels, from column d on. It prefetches the values `ahead` of the same steps if not
// null.
template <class T, int M, int P>
__attribute__((noinline)) void weigh_on_tiles(const T* probabilities, const T* const* values, const T* const* ahead,
                                              Range steps, i64 d, float* acc, i64 stride, bool fresh) {
  constexpr T* type = nullptr;
  constexpr i64 line = KEY_TILE * i64(sizeof(T)), panel = VALUE_TOKENS * 16;
  const i64 bytes = stride * i64(sizeof(float));
  auto on_sums = [&](auto f) {
    f.template operator()<0, 0>();
    if constexpr (M == 2) f.template operator()<1, 0>();
    if constexpr (P == 2) f.template operator()<0, 1>();
    if constexpr (M == 2 && P == 2) f.template operator()<1, 1>();
  };
  on_sums([&]<int m, int p>() {
    if (fresh) amx::zero<2 * m + p>();
    else amx::load<2 * m + p>(acc + d + m * TILE_HEIGHT * stride + p * LANES, bytes);
  });
  for (i64 i = steps.first; i < steps.last; ++i) {
    if (ahead && ahead[i]) fetch_elements(ahead[i] + d * VALUE_TOKENS, P * panel);
    const T *rows = probabilities + i * VALUE_TOKENS, *panels = values[i] + d * VALUE_TOKENS;
    amx::load<4>(rows, line);
    if constexpr (M == 2) amx::load<5>(rows + TILE_HEIGHT * KEY_TILE, line);
    amx::load<6>(panels, TILE_LINE);
    if constexpr (P == 2) amx::load<7>(panels + panel, TILE_LINE);
    amx::dot<0, 4, 6>(type);
    if constexpr (M == 2) amx::dot<2, 5, 6>(type);
    if constexpr (P == 2) amx::dot<1, 4, 7>(type);
    if constexpr (M == 2 && P == 2) amx::dot<3, 5, 7>(type);
  }
  on_sums([&]<int m, int p>() { amx::store<2 * m + p>(acc + d + m * TILE_HEIGHT * stride + p * LANES, bytes); });
}

// Computes all columns of this product.
template <class T>
INLINE void weigh_tiled(const T* probabilities, const T* const* values, const T* const* ahead, Range steps, i64 rows,
                        i64 v_dim, float* acc, bool fresh) {
  auto columns = [&]<int M>(std::integral_constant<int, M>) {
    i64 d = 0;
    for (; d + 32 <= v_dim; d += 32) weigh_on_tiles<T, M, 2>(probabilities, values, ahead, steps, d, acc, v_dim, fresh);
    if (d < v_dim) weigh_on_tiles<T, M, 1>(probabilities, values, ahead, steps, d, acc, v_dim, fresh);
  };
  shape_tiles(rows < TILE_HEIGHT ? rows : TILE_HEIGHT, rows > TILE_HEIGHT ? rows - TILE_HEIGHT : 0);
  if (rows > TILE_HEIGHT) columns(std::integral_constant<int, 2>());
  else columns(std::integral_constant<int, 1>());
}

// Computes this product for any number of rows by vectors.
template <class T>
INLINE void weigh_panels(const T* probabilities, const T* const* values, const T* const* ahead, Range steps, i64 rows,
                         i64 v_dim, float* acc, bool fresh) {
  constexpr i64 panel = VALUE_TOKENS * 16;
  for (i64 step = steps.first; step < steps.last; ++step) {
    const bool fetches = ahead && ahead[step];
    i64 d = 0;
    auto columns = [&]<int P>(std::integral_constant<int, P>) {
      for (; d + P * LANES <= v_dim; d += P * LANES) {
        const T *panels[P], *next[P];
        for (int p = 0; p < P; ++p) {
          panels[p] = values[step] + d * VALUE_TOKENS + p * panel;
          if (fetches) next[p] = ahead[step] + d * VALUE_TOKENS + p * panel;
        }
        row_tiles(rows, TILE_ROWS, [&](i64 row, i64 height) {
          const T* left[TILE_ROWS];
          for (i64 m = 0; m < height; ++m) left[m] = probabilities + (row + m) * KEY_TILE + step * VALUE_TOKENS;
          multiply<T, P>(height, left, panels, {fetches && row == 0 ? next : nullptr}, VALUE_TOKENS,
                         acc + row * v_dim + d, v_dim, fresh && step == steps.first);
        });
      }
    };
    columns(std::integral_constant<int, TILE_PANELS>());
    if constexpr (TILE_PANELS > 1) columns(std::integral_constant<int, 1>());
  }
}

// Computes this product for at most M rows with a tile in int8, widened in registers. Places without a key hold any
// number.
template <class T, int M, int P>
INLINE void weigh_int8(const T* probabilities, const Tile<i8>& tile, const Tile<i8>& next, Range pieces, i64 rows,
                       i64 v_dim, float* acc, bool fresh) {
  for (i64 p = pieces.first; p < pieces.last; ++p) {
    const T* left[M];
    for (i64 m = 0; m < rows; ++m) left[m] = probabilities + m * KEY_TILE + p * 16;
    i64 d = 0;
    auto columns = [&]<int N>(std::integral_constant<int, N>) {
      for (; d + N * LANES <= v_dim; d += N * LANES) {
        const i8 *panels[N], *ahead[N];
        for (int i = 0; i < N; ++i) panels[i] = tile.panel(p, d + i * 16), ahead[i] = next.panel(p, d + i * 16);
        int8_multiply<T, M, N>(rows, left, panels, ahead, 16, acc + d, v_dim, fresh && p == pieces.first);
      }
    };
    columns(std::integral_constant<int, P>());
    if constexpr (P > 1) columns(std::integral_constant<int, 1>());
  }
}

}  // namespace inferc
