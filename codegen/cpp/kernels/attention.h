// Paged attention: new queries of each sequence over its blocks, prefill and decode alike.
// For one kv head the query rows are (token, head of the group): rows of a small matrix multiplication. Keys go in
// tiles of 64 or 128 at absolute positions; splits of 512 keys are finished on their own and merged ascending. A fully masked
// tile changes no bit, so a row's result depends neither on its neighbours nor on how the prompt was cut into steps.
// Probabilities are rounded to T before they meet the values, whose products then go as those of a weight do; what they
// are divided by is the sum of them as they were.
// K and V in int8 are multiplied as the integers they are, widened; a key's score is then multiplied by its scale, and a
// probability by that of its value.
// Source: Dao 2023, arXiv:2307.08691 (tiling); Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
#pragma once
#include "kv.h"

namespace inferc {

// With tiles a larger piece shares what vectors do for it, and sums are loaded and stored less often.
constexpr i64 KEY_TILE = AMX ? 128 : 64, KEY_SPLIT = 512, QUERY_ROWS = AMX ? 256 : 48;
constexpr int PIECES = KEY_TILE / 16;  // of 16 keys
constexpr int NARROW_ROWS = TALL_ROWS ? 6 : 4;  // at most so many rows widen keys in int8 in registers
constexpr float MINUS_INF = -__builtin_inff();

enum Mask { CAUSAL, SLIDING, CHUNKED };

// C is the pool's kind: a Cache, or a Latent where all heads share one K that holds V; in T or in int8.
template <class T, class C = Cache<T>>
struct Attention {
  using S = typename C::Stored;
  Rows<const T> q;  // [tokens, num_heads * dim]
  Rows<T> out;      // [tokens, num_heads * v_dim]
  C cache;
  const i32* block_table;
  i64 max_blocks;
  const i32* query_start_loc;
  const i32* seq_lens;
  const T* sinks;  // [num_heads] or null
  i64 num_seqs, num_heads;
  float scale, softcap;
  Mask mask;
  i64 window;
  float* partials;    // for splits that go to several threads, or null
  i64 max_partials;   // floats there

  static constexpr bool latent = C::latent;
  static constexpr bool widens = !std::is_same_v<T, S>;
  static constexpr bool tiled = AMX && std::is_same_v<T, bf16>;  // the products are on tiles
  INLINE i64 group() const { return num_heads / cache.heads; }
  // The query heads of one kv head go in parts of at most QUERY_ROWS.
  INLINE i64 parts() const { return (group() + QUERY_ROWS - 1) / QUERY_ROWS; }
  INLINE i64 part_size() const { return (group() + parts() - 1) / parts(); }
  INLINE i64 dim() const { return cache.dim; }
  INLINE i64 v_dim() const {
    if constexpr (latent) return cache.v_dim;
    else return cache.dim;
  }
  // The first key that the query at `position` sees; the last is its own.
  INLINE i64 first_key(i64 position) const {
    if (mask == SLIDING) return position - window + 1 > 0 ? position - window + 1 : 0;
    if (mask == CHUNKED) return position / window * window;
    return 0;
  }
};

// Softmax state of some rows: maximum, sum and unnormalised output [rows, dim].
struct State {
  float *high, *total, *acc;
};

// A piece of work: tokens [begin, end) of a sequence (counted from its first new one) for `heads` query heads from
// `first` on, of those of one kv head.
struct Piece {
  i64 seq, head, first, heads, begin, end;
  INLINE i64 rows() const { return (end - begin) * heads; }
};

// Part `index` of all parts of all kv heads.
template <class A>
INLINE Piece piece_of(const A& a, i64 seq, i64 index, i64 begin, i64 end) {
  i64 head = index / a.parts(), first = index % a.parts() * a.part_size(), left = a.group() - first;
  return {seq, head, first, left < a.part_size() ? left : a.part_size(), begin, end};
}

// The pieces of a tile's keys and of their values, in the pool, and those of the next tile: they are fetched a whole
// tile ahead, into the second-level cache, which takes more lines at a time than the first.
template <class S>
struct Tile {
  const S *keys[PIECES], *values[PIECES], *next_keys[PIECES], *next_values[PIECES];
  i64 dim;  // of a piece's rows

  // Sums of q with 16 keys, or probabilities of 16 values, times the scales of what they are multiplied with.
  INLINE Vec by_scales(Vec x, const S* piece) const {
    if constexpr (!std::is_same_v<S, i8>) return x;
    else return mul(x, load(reinterpret_cast<const float*>(piece + 16 * dim)));
  }
  // The next tile's scales, which lie behind the rows that are fetched as this one's are read.
  INLINE void fetch_scales() const {
    if constexpr (std::is_same_v<S, i8>)
      for (int p = 0; p < PIECES; ++p)
        for (const S* piece : {next_keys[p], next_values[p]})
          fetch_l2(piece + 16 * dim);
  }
};

// A tile of latents as panels, as K lies in a Cache: the rows of one tile are each read by all query heads.
template <class T, class S>
INLINE void pack_keys(const Tile<S>& tile, T* panels) {
  constexpr i64 unit = Dot<T>::unit;
  T wide[MAX_LATENT_DIM];
  for (i64 token = 0; token < KEY_TILE; ++token) {
    const S* stored = tile.keys[token / 16] + token % 16 * tile.dim;
    const T* row = wide;
    if constexpr (std::is_same_v<T, S>) row = stored;
    else
      for (i64 d = 0; d < tile.dim; d += LANES) store(wide + d, load(stored + d));
    T* to = panels + token / 16 * 16 * tile.dim + token % 16 * unit;
    for (i64 d = 0; d < tile.dim; d += unit) memcpy(to + d * 16, row + d, sizeof(T) * unit);
  }
}

// scores [rows][KEY_TILE] = q @ K.T of panels in T; row_of(r) is q's row r. Fetches `ahead` meanwhile unless it is null.
template <class T, class R>
INLINE void score_panels(const T* const* panels, const T* const* ahead, i64 rows, R row_of, i64 dim, float* scores) {
  row_tiles(rows, TILE_ROWS, [&](i64 row, i64 height) {
    const T* left[TILE_ROWS];
    for (i64 m = 0; m < height; ++m) left[m] = row_of(row + m);
    for (int p = 0; p < PIECES; p += TILE_PANELS)
      multiply<T, TILE_PANELS>(height, left, panels + p, ahead ? ahead + p : nullptr, dim,
                               scores + row * KEY_TILE + p * LANES, KEY_TILE, true);
  });
}

// The same for at most 32 rows that `pack_rows` left, from `row` on, on tiles. Fetches `ahead` meanwhile unless it is null.
template <class T>
INLINE void score_packed(const T* packed, i64 row, i64 dim, const T* const* panels, const T* const* ahead, i64 height,
                         float* scores) {
  constexpr i64 K = TILE_K<T>;
  alignas(64) T last_tiles[PIECES * TILE_HEIGHT * K];
  const T* last[PIECES];
  for (int p = 0; p < PIECES; ++p) {
    last[p] = last_tiles + p * TILE_HEIGHT * K;
    if (dim % K) last_tile(panels[p], dim, last_tiles + p * TILE_HEIGHT * K);
  }
  const RowTiles a = packed_tiles(packed, row / TILE_HEIGHT, dim, K);
  for (int p = 0; p < PIECES; p += 2) {
    TileAhead next;
    if (ahead) next = {reinterpret_cast<const char*>(ahead[p]), reinterpret_cast<const char*>(ahead[p + 1]), TILE_BYTES};
    tile_product<T, PANELS>(height, a, 2, panels + p, last + p, next, dim, nullptr, scores + p * LANES, KEY_TILE);
  }
}

// The same, of at most M rows, with a tile in int8, widened in registers, P panels at a time.
template <class T, int M, int P, class R>
INLINE void score_int8(const Tile<i8>& tile, i64 rows, R row_of, float* scores) {
  const T* left[M];
  for (i64 m = 0; m < rows; ++m) left[m] = row_of(m);
  for (int p = 0; p < PIECES; p += P)
    int8_multiply<T, M, P, true>(rows, left, tile.keys + p, tile.next_keys + p, tile.dim, scores + p * LANES, KEY_TILE);
}

// A tile's keys in int8 as panels in T. Fetches the next tile's meanwhile.
template <class T>
INLINE void widen_keys(const Tile<i8>& tile, T* panels) {
  for (int p = 0; p < PIECES; ++p)
    for (i64 at = 0; at < 16 * tile.dim; at += 64) {
      fetch_l2(tile.next_keys[p] + at);
      widen_line(tile.keys[p] + at, panels + p * 16 * tile.dim + at);
    }
}

// A tile's keys as panels in T, those of the next one if they lie so in the pool, and room for them if they do not.
template <class T, class C>
struct KeyPanels {
  static constexpr bool in_place = !C::latent && std::is_same_v<T, typename C::Stored>;
  const T *panels[PIECES], *next[PIECES];
  alignas(64) T wide[in_place ? 1 : KEY_TILE * (C::latent ? MAX_LATENT_DIM : MAX_HEAD_DIM)];

  INLINE void read(const Tile<typename C::Stored>& tile) {
    if constexpr (C::latent) pack_keys(tile, wide);
    else if constexpr (!in_place) widen_keys(tile, wide);
    for (int p = 0; p < PIECES; ++p) {
      if constexpr (in_place) panels[p] = tile.keys[p], next[p] = tile.next_keys[p];
      else panels[p] = wide + p * 16 * tile.dim;
    }
  }
};

// scores [rows][KEY_TILE] = q @ K.T of one tile, without the scales, of the piece's rows from `row` on. `packed` has q's
// rows if they go through tiles: then all do, so that no row's bits depend on the others.
template <class T, class C, class R>
INLINE void score_tile(const Attention<T, C>& a, const Tile<typename C::Stored>& tile, i64 row, i64 rows, R row_of,
                       const T* packed, KeyPanels<T, C>& keys, float* scores) {
  if constexpr (a.widens && !a.latent && !a.tiled) {
    if (rows <= 2) return score_int8<T, 2, TILE_PANELS>(tile, rows, row_of, scores);
    if (rows <= NARROW_ROWS) return score_int8<T, NARROW_ROWS, TALL_ROWS ? 2 : 1>(tile, rows, row_of, scores);
  }
  if (row == 0) keys.read(tile);
  const T* const* next = keys.in_place && row == 0 ? keys.next : nullptr;
  if constexpr (a.tiled) score_packed(packed, row, tile.dim, keys.panels, next, rows, scores);
  else score_panels(keys.panels, next, rows, row_of, tile.dim, scores);
}

// e^(x - base), for probabilities in T: bfloat16 has 8 bits of them, and takes 2^x within 3e-6.
template <class T>
INLINE Vec probability(Vec x, Vec base) {
  if constexpr (!std::is_same_v<T, bf16>) return exp(sub(x, base));
  const Vec least = set1(-126.0f);  // no denormals, as in `exp`
  Vec power = mul(sub(x, base), set1(1.44269504088896341f));
  Vec within = max(least, power);
  Vec n = nearest(within), r = sub(within, n);
  Vec p = set1(9.582852945e-3f);
  p = fma(p, r, set1(5.590642616e-2f));
  p = fma(p, r, set1(2.402409911e-1f));
  p = fma(p, r, set1(6.931241751e-1f));
  p = fma(p, r, set1(1.0f));
  return less(power, least, zero(), scale2(p, n));
}

// One row of scores -> probabilities in T, times the values' scales; MASKED: keys outside [low, high) of the tile are not
// there. Adds them to total [16], and returns the factor that what was summed before must be multiplied by.
template <class T, bool MASKED, class S>
INLINE float softmax_row(const Tile<S>& tile, const float* scores, i64 low, i64 high, float scale, float softcap, float& top,
                         float* total, T* probabilities) {
  auto seen = [&](Vec x, int p, Vec other) {
    return MASKED ? keep(x, int(low) - p * LANES, int(high) - p * LANES, other) : x;
  };
  Vec s[PIECES], tile_top = set1(MINUS_INF);
#pragma GCC unroll 8
  for (int p = 0; p < PIECES; ++p) {
    s[p] = mul(tile.by_scales(load(scores + p * LANES), tile.keys[p]), set1(scale));
    if (softcap != 0.0f) s[p] = mul(tanh(div(s[p], set1(softcap))), set1(softcap));
    s[p] = seen(s[p], p, set1(MINUS_INF));
    tile_top = max(tile_top, s[p]);
  }
  float factor = 1.0f;
  Vec sum = load(total);
  if (lanes_less(set1(top), tile_top)) {  // ever more rarely
    const float before = top;
    top = maximum(tile_top);
    factor = exp(before - top);
    sum = mul(sum, set1(factor));
  }
  const Vec base = set1(top == MINUS_INF ? 0.0f : top);
#pragma GCC unroll 8
  for (int p = 0; p < PIECES; ++p) {
    s[p] = seen(probability<T>(s[p], base), p, zero());
    sum = add(sum, s[p]);
    store(probabilities + p * LANES, seen(tile.by_scales(s[p], tile.values[p]), p, zero()));
  }
  store(total, sum);
  return factor;
}

// The rows of a tile's values that one step of k takes, from `key` on; zeros for those outside [first, end): they may lie
// in block 0, where anything is, and 0 * NaN is NaN.
template <class T, class S>
struct ValueRows {
  const S* rows[Dot<T>::unit];

  INLINE ValueRows(const Tile<S>& tile, i64 key, i64 first, i64 end) {
    static constexpr S nothing[MAX_HEAD_DIM] = {};
    for (i64 u = 0; u < Dot<T>::unit; ++u) {
      const i64 at = key + u;
      rows[u] = at >= first && at < end ? tile.values[at / 16] + at % 16 * tile.dim : nothing;
    }
  }
};

// Fetches of the next tile's values the share of columns [column, column + width) of the keys that go into one step.
template <class T, class S>
INLINE void fetch_values(const Tile<S>& tile, i64 key, i64 column, i64 width) {
  constexpr i64 unit = Dot<T>::unit;
  const char* next = reinterpret_cast<const char*>(tile.next_values[key / 16] + column * 16 + key % 16 * width);
  for (i64 at = 0; at < unit * width * i64(sizeof(S)); at += 64) fetch_l2(next + at);
}

// A tile's values as panels over its keys, [dim / 16][KEY_TILE / unit][16][unit] in T.
template <class T, class S>
INLINE void pack_values(const Tile<S>& tile, i64 first, i64 end, i64 dim, T* panels) {
  for (i64 key = 0; key < KEY_TILE; key += Dot<T>::unit) {
    const ValueRows<T, S> from(tile, key, first, end);
    fetch_values<T>(tile, key, 0, dim);
    for (i64 d = 0; d < dim; d += LANES) Dot<T>::put(panels + d * KEY_TILE + key * LANES, Dot<T>::right(from.rows, d));
  }
}

// acc = acc * factor + probabilities @ values, for so few rows that the values are put together in registers: M rows, P
// vectors of columns.
template <class T, class S, int M, int P>
__attribute__((noinline)) void weigh_columns(const T* probabilities, const Tile<S>& tile, i64 first, i64 end, i64 dim,
                                             i64 column, const float* factor, float* acc) {
  using D = Dot<T>;
  Vec sums[M][P];
#pragma GCC unroll 32
  for (int i = 0; i < M * P; ++i)
    sums[i / P][i % P] = mul(load(acc + i / P * dim + column + i % P * LANES), set1(factor[i / P]));
  for (i64 key = 0; key < KEY_TILE; key += D::unit) {
    const ValueRows<T, S> from(tile, key, first, end);
    fetch_values<T>(tile, key, column, P * LANES);
    typename D::B right[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) right[p] = D::right(from.rows, column + p * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const typename D::A left = D::left(probabilities + m * KEY_TILE + key);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) sums[m][p] = D::step(sums[m][p], left, right[p]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < M * P; ++i) store(acc + i / P * dim + column + i % P * LANES, sums[i / P][i % P]);
}

template <class T, class S, int M>
INLINE void weigh_few(const T* probabilities, const Tile<S>& tile, i64 first, i64 end, i64 dim, const float* factor,
                      float* acc) {
  constexpr int P = TILE_PANELS > 1 ? TILE_PANELS : M <= 2 ? 2 : 1;
  i64 column = 0;
  for (; column + P * LANES <= dim; column += P * LANES)
    weigh_columns<T, S, M, P>(probabilities, tile, first, end, dim, column, factor, acc);
  if constexpr (P > 1)
    for (; column < dim; column += LANES)
      weigh_columns<T, S, M, 1>(probabilities, tile, first, end, dim, column, factor, acc);
}

// The same with values that `pack_values` put together: their products are those of a weight.
template <class T, class C>
INLINE void weigh_packed(const Attention<T, C>& a, const T* probabilities, const T* values, i64 rows, const float* factor,
                         float* acc) {
  const i64 dim = a.v_dim();
  constexpr i64 panel = KEY_TILE * LANES;
  for (i64 r = 0; r < rows; ++r) {
    if (factor[r] == 1.0f) continue;
    for (i64 d = 0; d < dim; d += LANES) store(acc + r * dim + d, mul(load(acc + r * dim + d), set1(factor[r])));
  }
  if constexpr (a.tiled) {
    constexpr i64 line = KEY_TILE * i64(sizeof(T));
    const char* first = reinterpret_cast<const char*>(probabilities);
    const RowTiles left{first, first + TILE_HEIGHT * line, line, TILE_LINE};
    for (i64 d = 0; d < dim; d += 2 * LANES) {
      const T* panels[2] = {values + d * KEY_TILE, values + d * KEY_TILE + panel};
      tile_product<T, PANELS>(rows, left, (dim - d) / LANES, panels, panels, {}, KEY_TILE, acc + d, acc + d, dim);
    }
    return;
  }
  row_tiles(rows, TILE_ROWS, [&](i64 row, i64 height) {
    const T *left[TILE_ROWS], *panels[TILE_PANELS];
    for (i64 m = 0; m < height; ++m) left[m] = probabilities + (row + m) * KEY_TILE;
    i64 d = 0;
    auto columns = [&]<int P>(std::integral_constant<int, P>) {
      for (; d + P * LANES <= dim; d += P * LANES) {
        for (int p = 0; p < P; ++p) panels[p] = values + d * KEY_TILE + p * panel;
        multiply<T, P>(height, left, panels, nullptr, KEY_TILE, acc + row * dim + d, dim, false);
      }
    };
    columns(std::integral_constant<int, TILE_PANELS>());
    columns(std::integral_constant<int, 1>());
  });
}

// acc [rows, dim] = acc * factor [rows] + probabilities [rows][KEY_TILE] @ the tile's values from `first` to `end`. `packed` is
// room for a copy of those, which few rows do without; the additions are the same. It is made for the piece's rows from
// `row` = 0 on, and kept for the others.
template <class T, class C>
INLINE void weigh_tile(const Attention<T, C>& a, const T* probabilities, const Tile<typename C::Stored>& tile, i64 first,
                       i64 end, i64 row, i64 rows, const float* factor, T* packed, float* acc) {
  using S = typename C::Stored;
#define ROWS(M) \
  case M: return weigh_few<T, S, M>(probabilities, tile, first, end, a.v_dim(), factor, acc);
  if constexpr (!a.tiled) {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) }
    if constexpr (NARROW_ROWS == 6)
      switch (rows) { ROWS(5) ROWS(6) }
  }
#undef ROWS
  if (row == 0) pack_values(tile, first, end, a.v_dim(), packed);
  weigh_packed(a, probabilities, packed, rows, factor, acc);
}

// q's rows of a piece.
template <class T, class C>
struct Queries {
  const Attention<T, C>& a;
  i64 first_token, first_head, heads;
  INLINE Queries(const Attention<T, C>& a_, const Piece& piece)
      : a(a_), first_token(a.query_start_loc[piece.seq] + piece.begin), first_head(piece.head * a.group() + piece.first),
        heads(piece.heads) {}
  INLINE const T* operator()(i64 row) const { return a.q[first_token + row / heads] + (first_head + row % heads) * a.dim(); }
};

// The same as tiles multiply them.
template <class T, class C>
struct PackedQueries {
  alignas(64) T rows[Attention<T, C>::tiled ? QUERY_ROWS * (C::latent ? MAX_LATENT_DIM : MAX_HEAD_DIM) : 1];
  INLINE PackedQueries(const Attention<T, C>& a, const Piece& piece) {
    if constexpr (a.tiled) pack_rows(Queries<T, C>(a, piece), 0, piece.rows(), 0, a.dim(), TILE_K<T>, rows);
  }
};

// One split of 512 keys for the rows of a piece: state starts empty. On tiles a few rows at a time go through all that is
// done with a tile, in the first-level cache.
template <class T, class C>
void attend_split(const Attention<T, C>& a, const Piece& piece, const PackedQueries<T, C>& packed, i64 split, State state) {
  constexpr i64 at_once = a.tiled ? TILE_PAIR : QUERY_ROWS;
  i64 dim = a.v_dim(), heads = piece.heads, rows = piece.rows(), size = a.cache.block_size;
  i64 first_new = a.seq_lens[piece.seq] - (a.query_start_loc[piece.seq + 1] - a.query_start_loc[piece.seq]);
  i64 key_end = first_new + piece.end, key_begin = a.first_key(first_new + piece.begin);
  const Queries<T, C> row_of(a, piece);
  const i32* blocks = a.block_table + piece.seq * a.max_blocks;
  alignas(64) float scores[at_once * KEY_TILE], totals[QUERY_ROWS * LANES], factor[at_once];
  alignas(64) T probabilities[at_once * KEY_TILE], values[KEY_TILE * MAX_HEAD_DIM];
  KeyPanels<T, C> keys;
  for (i64 r = 0; r < rows; ++r) state.high[r] = MINUS_INF;
  memset(totals, 0, rows * LANES * sizeof(float));
  memset(state.acc, 0, rows * dim * sizeof(float));
  for (i64 key = split * KEY_SPLIT; key < (split + 1) * KEY_SPLIT && key < key_end; key += KEY_TILE) {
    if (key + KEY_TILE <= key_begin) continue;
    Tile<typename C::Stored> tile;
    tile.dim = a.dim();
    for (i64 p = 0; p < PIECES; ++p) {
      i64 token = key + p * 16 < key_end ? key + p * 16 : key;  // past the end: any panel, masked below
      i64 later = token + KEY_TILE < key_end ? token + KEY_TILE : token;
      tile.keys[p] = a.cache.keys(blocks[token / size], piece.head, token % size);
      tile.values[p] = a.cache.values(blocks[token / size], piece.head, token % size);
      tile.next_keys[p] = a.cache.keys(blocks[later / size], piece.head, later % size);
      tile.next_values[p] = a.cache.values(blocks[later / size], piece.head, later % size);
    }
    tile.fetch_scales();
    for (i64 row = 0; row < rows; row += at_once) {
      const i64 count = rows - row < at_once ? rows - row : at_once;
      score_tile(a, tile, row, count, row_of, packed.rows, keys, scores);
      for (i64 r = 0; r < count; ++r) {
        const i64 position = first_new + piece.begin + (row + r) / heads;
        const i64 low = a.first_key(position) - key, high = position + 1 - key;
        auto softmax = [&]<bool MASKED>(std::bool_constant<MASKED>) {
          factor[r] = softmax_row<T, MASKED>(tile, scores + r * KEY_TILE, low, high, a.scale, a.softcap, state.high[row + r],
                                             totals + (row + r) * LANES, probabilities + r * KEY_TILE);
        };
        if (low > 0 || high < KEY_TILE) softmax(std::true_type());
        else softmax(std::false_type());
      }
      weigh_tile(a, probabilities, tile, key_begin - key, key_end - key, row, count, factor, values, state.acc + row * dim);
    }
  }
  for (i64 r = 0; r < rows; ++r) state.total[r] = sum(load(totals + r * LANES));
}

// into = into merged with one more split.
INLINE void merge_row(float& high, float& total, float* acc, float split_high, float split_total, const float* split_acc,
                      i64 dim) {
  float top = fmaxf(high, split_high);
  if (top == MINUS_INF) return;
  float old_factor = exp(high - top), new_factor = exp(split_high - top);
  for (i64 d = 0; d < dim; d += LANES)
    store(acc + d, fma(load(split_acc + d), set1(new_factor), mul(load(acc + d), set1(old_factor))));
  total = total * old_factor + split_total * new_factor;
  high = top;
}

// The sinks' share and the division; writes the rows of out.
template <class T, class C>
INLINE void finish_row(const Attention<T, C>& a, i64 token, i64 head, float high, float total, const float* acc) {
  i64 dim = a.v_dim();
  float factor = 1.0f;
  if (a.sinks) {
    float sink = to_float(a.sinks[head]), top = fmaxf(high, sink);
    factor = exp(high - top);
    total = total * factor + exp(sink - top);
  }
  Vec scale = set1(factor / total);
  for (i64 d = 0; d < dim; d += LANES) store(a.out[token] + head * dim + d, mul(load(acc + d), scale));
}

// The splits that any row of the piece sees: [first, last).
template <class T, class C>
INLINE void split_range(const Attention<T, C>& a, const Piece& piece, i64& begin, i64& end) {
  i64 new_tokens = a.query_start_loc[piece.seq + 1] - a.query_start_loc[piece.seq];
  i64 first_new = a.seq_lens[piece.seq] - new_tokens;
  begin = a.first_key(first_new + piece.begin) / KEY_SPLIT;
  end = (first_new + piece.end + KEY_SPLIT - 1) / KEY_SPLIT;
}

template <class T, class C>
void attend_piece(const Attention<T, C>& a, const Piece& piece) {
  i64 dim = a.v_dim(), rows = piece.rows(), begin, end;
  alignas(64) float acc[QUERY_ROWS * MAX_HEAD_DIM], split_acc[QUERY_ROWS * MAX_HEAD_DIM];
  float high[QUERY_ROWS], total[QUERY_ROWS], split_high[QUERY_ROWS], split_total[QUERY_ROWS];
  for (i64 r = 0; r < rows; ++r) high[r] = MINUS_INF, total[r] = 0.0f;
  memset(acc, 0, rows * dim * sizeof(float));
  split_range(a, piece, begin, end);
  const PackedQueries<T, C> packed(a, piece);
  for (i64 split = begin; split < end; ++split) {
    attend_split(a, piece, packed, split, State{split_high, split_total, split_acc});
    for (i64 r = 0; r < rows; ++r)
      merge_row(high[r], total[r], acc + r * dim, split_high[r], split_total[r], split_acc + r * dim, dim);
  }
  i64 token = a.query_start_loc[piece.seq] + piece.begin, first_head = piece.head * a.group() + piece.first;
  for (i64 r = 0; r < rows; ++r)
    finish_row(a, token + r / piece.heads, first_head + r % piece.heads, high[r], total[r], acc + r * dim);
}

// Decode of few sequences: every split of every (sequence, part of heads) is a piece of its own, merged after a barrier.
template <class T, class C>
void attend_by_splits(Team& team, const Attention<T, C>& a, i64 max_splits) {
  i64 most = a.part_size(), dim = a.v_dim(), parts = a.cache.heads * a.parts(), row_size = dim + 2;
  auto partial = [&](i64 pair, i64 split) { return a.partials + (pair * max_splits + split) * most * row_size; };
  auto state = [&](float* data) { return State{data, data + most, data + 2 * most}; };
  team.each(a.num_seqs * parts * max_splits, 1, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      Piece piece = piece_of(a, i / max_splits / parts, i / max_splits % parts, 0, 1);
      i64 first, last, split = i % max_splits;
      split_range(a, piece, first, last);
      if (split >= first && split < last)
        attend_split(a, piece, PackedQueries<T, C>(a, piece), split, state(partial(i / max_splits, split)));
    }
  });
  team.barrier();
  team.each(a.num_seqs * parts, 1, [&](i64 begin, i64 end) {
    for (i64 pair = begin; pair < end; ++pair) {
      Piece piece = piece_of(a, pair / parts, pair % parts, 0, 1);
      i64 first, last;
      split_range(a, piece, first, last);
      for (i64 r = 0; r < piece.heads; ++r) {
        alignas(64) float acc[MAX_HEAD_DIM] = {};
        float high = MINUS_INF, total = 0.0f;
        for (i64 split = first; split < last; ++split) {
          State one = state(partial(pair, split));
          merge_row(high, total, acc, one.high[r], one.total[r], one.acc + r * dim, dim);
        }
        finish_row(a, a.query_start_loc[piece.seq], piece.head * a.group() + piece.first + r, high, total, acc);
      }
    }
  });
}

template <class A>
KERNEL void paged_attention(Team& team, const A& a) {
  const i64 parts = a.cache.heads * a.parts(), new_tokens = a.query_start_loc[a.num_seqs];
  i64 tile = QUERY_ROWS / a.part_size(), longest = 0;  // tile: tokens of a piece
  auto tiles = [&](i64 seq) { return (a.query_start_loc[seq + 1] - a.query_start_loc[seq] + tile - 1) / tile; };
  auto all_pieces = [&] {
    i64 count = 0;
    for (i64 seq = 0; seq < a.num_seqs; ++seq) count += tiles(seq) * parts;
    return count;
  };
  while (AMX && tile * a.part_size() > 2 * TILE_PAIR && all_pieces() < 4 * team.count) tile /= 2;
  const i64 pieces = all_pieces();
  for (i64 seq = 0; seq < a.num_seqs; ++seq) longest = a.seq_lens[seq] > longest ? a.seq_lens[seq] : longest;
  i64 max_splits = (longest + KEY_SPLIT - 1) / KEY_SPLIT;
  i64 needed = a.num_seqs * parts * max_splits * a.part_size() * (a.v_dim() + 2);
  bool few = pieces < 2 * team.count && new_tokens == a.num_seqs && max_splits > 1;
  if (few && a.partials && needed <= a.max_partials) return attend_by_splits(team, a, max_splits);
  // Backwards, so that the longest pieces of a prompt (its last tokens) start first.
  i64 seq = a.num_seqs, base = pieces;
  team.each(pieces, 1, [&](i64 begin, i64) {
    i64 piece = pieces - 1 - begin;
    while (piece < base) base -= tiles(--seq) * parts;
    i64 count = a.query_start_loc[seq + 1] - a.query_start_loc[seq];
    // All of a KV head behind each other: its K and V then stay in the second-level cache.
    i64 part = (piece - base) / tiles(seq), token = (piece - base) % tiles(seq) * tile;
    attend_piece(a, piece_of(a, seq, part, token, token + tile < count ? token + tile : count));
  });
}

}  // namespace inferc
