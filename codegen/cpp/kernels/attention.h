// Paged attention: the new queries of each sequence over its KV blocks, for prefill and decode alike.
// For one KV head the query rows are (token, head of the group): rows of a small matrix multiplication. Keys go in
// tiles of 64 or 128 at absolute positions; splits of 512 keys are finished on their own and merged in ascending order.
// Masked keys change no bit, so a row's result depends neither on its neighbours nor on how the prompt was cut into
// steps; what no row of a tile sees is not computed.
// Probabilities are rounded to T before they are multiplied by the values, in the same order as products of a weight;
// the divisor is the sum of the unrounded probabilities.
// K and V in int8 are multiplied as integers, widened; a key's score is then multiplied by its scale, and a probability
// by that of its value.
// Source: Dao 2023, arXiv:2307.08691 (tiling); Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
#pragma once
#include "key_tile.h"

namespace inferc {

constexpr i64 KEY_SPLIT = 512, QUERY_ROWS = AMX ? 256 : 48;

constexpr double MASS_OF_ONE = 0x1p32;

enum Mask { CAUSAL, SLIDING, CHUNKED };

// C is the pool's kind: a Cache, or a Latent where all heads share one K that contains V; in T or in int8.
// B is the bias that is added to a score: NoBias, or Alibi.
template <class T, class C = Cache<T>, class B = NoBias>
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
  Scores scores;
  Mask mask;
  i64 window;
  float* partials;    // for splits that go to several threads, or null
  i64 max_partials;   // the number of floats there
  const i32* mass_from = nullptr;  // as in StepArgs, with the group's own entry of `masses`
  i64* masses = nullptr;
  Echoes echoes = {};
  [[no_unique_address]] B bias = {};

  static constexpr bool biased = B::present;
  static constexpr bool latent = C::latent;
  static constexpr bool widens = !std::is_same_v<T, S>;
  static constexpr bool tiled = ON_TILES<T>;  // the products are on tiles
  INLINE i64 group() const { return num_heads / cache.heads; }
  // The query heads of one kv head go in parts of at most QUERY_ROWS.
  INLINE i64 parts() const { return (group() + QUERY_ROWS - 1) / QUERY_ROWS; }
  INLINE i64 part_size() const { return (group() + parts() - 1) / parts(); }
  // The number of 16-key pieces that vectors or tiles take at a time.
  static constexpr int granule = tiled || TILE_PANELS < 2 ? 2 : TILE_PANELS;
  INLINE i64 dim() const { return cache.dim; }
  INLINE i64 v_dim() const {
    if constexpr (latent) return cache.v_dim;
    else return cache.dim;
  }
  // The factor that a row's maxima are multiplied by at the end.
  INLINE float unit() const { return biased ? 1.0f : scores.unit(); }
  // The position of a sequence's first new token.
  INLINE i64 first_new(i64 seq) const { return seq_lens[seq] - (query_start_loc[seq + 1] - query_start_loc[seq]); }
  // The first key that the query at `position` sees; the last is its own.
  INLINE i64 first_key(i64 position) const {
    if (mask == SLIDING) return position - window + 1 > 0 ? position - window + 1 : 0;
    if (mask == CHUNKED) return position / window * window;
    return 0;
  }
};

// The softmax state of some rows: maximum, sum and unnormalised output [rows, dim]. Where the maximum is -inf no key
// was seen, and the output may be anything.
struct State {
  float *high, *total, *acc;
};

// A piece of work: tokens [begin, end) of a sequence (counted from its first new one) for `heads` query heads from
// `first` on, within the group of one KV head.
struct Piece {
  i64 seq, head, first, heads, begin, end;
  INLINE i64 rows() const { return (end - begin) * heads; }
};

// Part `index` of all parts of the query heads of all KV heads.
template <class A>
INLINE Piece piece_of(const A& a, i64 seq, i64 index, i64 begin, i64 end) {
  i64 head = index / a.parts(), first = index % a.parts() * a.part_size(), left = a.group() - first;
  return {seq, head, first, left < a.part_size() ? left : a.part_size(), begin, end};
}

// The rows of q of a piece.
template <class T, class C, class B>
struct Queries {
  const Attention<T, C, B>& a;
  i64 first_token, first_head, heads;
  INLINE Queries(const Attention<T, C, B>& a_, const Piece& piece)
      : a(a_),
        first_token(a.query_start_loc[piece.seq] + piece.begin),
        first_head(piece.head * a.group() + piece.first),
        heads(piece.heads) {}
  INLINE const T* operator()(i64 row) const {
    return a.q[first_token + row / heads] + (first_head + row % heads) * a.dim();
  }
};

// The rows of q of a piece, packed for tiles.
template <class T, class C, class B>
struct PackedQueries {
  alignas(64) T rows[Attention<T, C, B>::tiled ? QUERY_ROWS * (C::latent ? MAX_LATENT_DIM : MAX_HEAD_DIM) : 1];
  INLINE PackedQueries(const Attention<T, C, B>& a, const Piece& piece) {
    if constexpr (a.tiled) pack_rows(Queries<T, C, B>(a, piece), 0, piece.rows(), 0, a.dim(), TILE_K<T>, rows);
  }
};

// The first tile of a split that is visible to a query which sees keys from `key_begin` on.
INLINE i64 first_tile(i64 split, i64 key_begin) {
  const i64 tile = key_begin / KEY_TILE * KEY_TILE;
  return tile > split * KEY_SPLIT ? tile : split * KEY_SPLIT;
}

// The tile of a piece's keys from `key` on.
template <class T, class C, class B>
INLINE Tile<typename C::Stored> tile_at(const Attention<T, C, B>& a, const Piece& piece, i64 key) {
  return tile_of(a.cache, a.block_table + piece.seq * a.max_blocks, piece.head, key,
                 a.first_new(piece.seq) + piece.end);
}

// The rows of a piece, from its row `row` on, over one tile of keys.
template <class T, class C, class B>
struct RowGroup {
  using S = typename C::Stored;
  const Attention<T, C, B>& a;
  i64 row, count, heads, position, key;  // position: of the piece's first token; key: of the tile's first key
  i64 head;                              // the first head of the piece

  INLINE Range seen_by(i64 r) const {  // the keys of the tile that row r sees; the range may extend beyond the tile
    const i64 at = position + (row + r) / heads;
    return {a.first_key(at) - key, at + 1 - key};
  }
  // The conversion of products to scores in row r.
  INLINE auto scores_of(i64 r) const {
    if constexpr (!B::present) return a.scores;
    else
      return BiasedScores{a.scores.scale, a.bias.slopes[head + (row + r) % heads],
                          float(key - position - (row + r) / heads)};
  }
  INLINE Range seen() const {  // the keys that any row sees
    const i64 first = seen_by(0).first, last = seen_by(count - 1).last;
    return {first > 0 ? first : 0, last < KEY_TILE ? last : KEY_TILE};
  }

  // Computes the softmax of the tile's first `pieces`, at most N, and rescales previous sums as the maxima rise.
  template <int N>
  INLINE void softmax(const Tile<S>& tile, i64 pieces, const float* scores, float* top, float* totals, T* probabilities,
                      float* acc) const {
    if constexpr (N > A::granule)
      if (pieces <= N - A::granule)
        return softmax<N - A::granule>(tile, pieces, scores, top, totals, probabilities, acc);
    const i64 dim = a.v_dim();
    for (i64 r = 0; r < count; ++r) {
      const Range keys = seen_by(r);
      auto run = [&]<bool MASKED>(std::bool_constant<MASKED>) {
        return softmax_row<T, MASKED, N>(tile, scores + r * KEY_TILE, keys.first, keys.last, scores_of(r), top[r],
                                         totals + r * LANES, probabilities + r * KEY_TILE);
      };
      const bool masked = keys.first > 0 || keys.last < N * 16;
      const float factor = masked ? run(std::true_type()) : run(std::false_type());
      if (factor == 1.0f) continue;
      for (i64 d = 0; d < dim; d += LANES) store(acc + r * dim + d, mul(load(acc + r * dim + d), set1(factor)));
    }
  }

 private:
  using A = Attention<T, C, B>;
};

// One tile of keys for the rows of a piece.
template <class T, class C, class B>
struct TileWork {
  using A = Attention<T, C, B>;
  using S = typename C::Stored;
  static constexpr i64 at_once = A::tiled ? TILE_PAIR : QUERY_ROWS;  // rows
  const A& a;
  alignas(64) float scores[at_once * KEY_TILE];
  alignas(64) T probabilities[at_once * KEY_TILE];
  KeyPanels<T, C> keys;
  ValuePanels<T, C> values;
  INLINE explicit TileWork(const A& a_) : a(a_) {}  // the large buffers stay uninitialised

  INLINE void touch(const Tile<S>& next) {
    for (i64 p = 0; p < next.count(); ++p) {
      touch_pages(next.keys[p], 16 * next.dim * i64(sizeof(S)));
      // The start of a piece of V; the values of latents are in the keys' piece.
      if (!C::latent && p * 256 % next.apart == 0)
        touch_pages(next.values[p], next.apart / 16 * next.dim * i64(sizeof(S)));
    }
  }
  // Prefetches what the product of `pieces` does not prefetch, but only what will be read.
  INLINE void fetch_rest(const Tile<S>& next, Range pieces) {
    for (i64 p = 0; p < next.count(); ++p) {
      if (std::is_same_v<S, i8>) fetch_l2(next.key_scales[p]), fetch_l2(next.value_scales[p]);
      const bool beside = pieces.first <= p && p < pieces.last;
      if (!beside) fetch_elements(next.keys[p], 16 * next.dim);
      if (C::latent || (beside && p < whole(next))) continue;
      const i64 tokens = next.keys_there - p * 16 < 16 ? next.keys_there - p * 16 : 16;
      for (i64 d = 0; d < next.dim; d += 16) fetch_elements(next.panel(p, d), tokens * 16);
    }
  }
  // The number of 16-key pieces in those steps of the tile (VALUE_TOKENS keys each) whose keys all exist.
  INLINE static i64 whole(const Tile<S>& tile) { return tile.keys_there / VALUE_TOKENS * 2; }

  // Computes scores of `pieces`. first: whether they are the tile's first; then the next tile is prefetched, unless
  // null.
  template <class R>
  INLINE void score(const Tile<S>& tile, const Tile<S>* next, bool first, Range pieces, const RowGroup<T, C, B>& group,
                    R row_of, const T* packed) {
    const T* const* ahead = nullptr;
    if constexpr (keys.in_place)
      if (first && next) ahead = next->keys;
    if constexpr (A::tiled) score_packed(packed, group.row, tile.dim, keys.panels, ahead, pieces, group.count, scores);
    else score_panels(keys.panels, ahead, pieces, group.count, row_of, tile.dim, scores);
  }
  INLINE void weigh(const Tile<S>& tile, const Tile<S>* next, bool first, Range steps, i64 rows, float* acc,
                    bool fresh) {
    const T *later[STEPS], *const *ahead = nullptr;
    if constexpr (values.direct)
      if (first && next && values.lies_so(tile)) {
        for (int i = 0; i < STEPS; ++i) later[i] = 2 * i < whole(*next) ? next->values[2 * i] : nullptr;
        ahead = later;
      }
    if constexpr (A::tiled) weigh_tiled<T>(probabilities, values.steps, ahead, steps, rows, a.v_dim(), acc, fresh);
    else weigh_panels<T>(probabilities, values.steps, ahead, steps, rows, a.v_dim(), acc, fresh);
  }
};

// The softmax state while a split is computed: maxima are not yet multiplied by Scores::unit, sums are kept per lane.
struct Running {
  float *high, *totals, *acc;
  INLINE Running from(i64 row, i64 dim) const { return {high + row, totals + row * LANES, acc + row * dim}; }
  INLINE void start(i64 rows) const {
    for (i64 r = 0; r < rows; ++r) high[r] = MINUS_INF;
    memset(totals, 0, rows * LANES * sizeof(float));
  }
  INLINE bool is_fresh(i64 rows) const {  // whether no row has seen a key
    i64 r = 0;
    while (r < rows && high[r] == MINUS_INF) ++r;
    return r == rows;
  }
};

// Computes the tiles [begin, end) of a split for the rows of a piece. On tiles, a few rows at a time go through all
// operations with a tile, in the first-level cache. after: the tile that is read next, or null. Prefetching the first
// tile of the next piece gained nothing, and made the products after attention slower.
template <class T, class C, class B>
void attend_tiles(const Attention<T, C, B>& a, const Piece& piece, const PackedQueries<T, C, B>& packed,
                  i64 tiles_begin, i64 tiles_end, const Running& state, const Tile<typename C::Stored>* after) {
  using A = Attention<T, C, B>;
  using S = typename C::Stored;
  const i64 dim = a.v_dim(), rows = piece.rows(), begin = a.first_new(piece.seq) + piece.begin;
  const i64 key_begin = a.first_key(begin), key_end = a.first_new(piece.seq) + piece.end;
  const Queries<T, C, B> row_of(a, piece);
  TileWork<T, C, B> work(a);
  i64 key = tiles_begin;
  Tile<S> tile = tile_at(a, piece, key), following;
  for (; key < tiles_end; key += KEY_TILE, tile = following) {
    const bool is_last = key + KEY_TILE >= tiles_end;
    if (!is_last) following = tile_at(a, piece, key + KEY_TILE);
    const Tile<S>* next = is_last ? after : &following;
    const Range there{key_begin > key ? key_begin - key : 0, key_end - key < KEY_TILE ? key_end - key : KEY_TILE};
    bool first = true;
    for (i64 row = 0; row < rows; row += work.at_once) {
      const i64 height = rows - row < work.at_once ? rows - row : work.at_once;
      const RowGroup<T, C, B> group{a, row, height, piece.heads, begin, key, piece.head * a.group() + piece.first};
      const Range seen = group.seen(), pieces = seen.in(16).rounded_to(A::granule);
      if (seen.first >= seen.last) continue;
      if (first && next) work.touch(*next), work.fetch_rest(*next, seen.in(VALUE_TOKENS).times(2));
      const Running own = state.from(row, dim);
      const auto [top, totals, acc] = own;
      const bool fresh = own.is_fresh(group.count);
      auto softmax = [&, top = top, totals = totals, acc = acc] {
        group.template softmax<PIECES>(tile, pieces.last, work.scores, top, totals, work.probabilities, acc);
      };
      if constexpr (A::widens && !A::latent && !A::tiled) {
        const Tile<S>& ahead = next ? *next : tile;
        const Range steps = seen.in(16);
        if (rows <= 2) {
          score_int8<T, 2, TILE_PANELS>(tile, ahead, pieces, rows, row_of, work.scores);
          softmax();
          weigh_int8<T, 2, TILE_PANELS>(work.probabilities, tile, ahead, steps, rows, dim, acc, fresh);
          continue;
        }
        if (rows <= NARROW_ROWS) {
          constexpr int P = TALL_ROWS ? 2 : 1;
          score_int8<T, NARROW_ROWS, P>(tile, ahead, pieces, rows, row_of, work.scores);
          softmax();
          weigh_int8<T, NARROW_ROWS, P>(work.probabilities, tile, ahead, steps, rows, dim, acc, fresh);
          continue;
        }
      }
      if (first) work.keys.read(tile, next, there.in(16).rounded_to(A::granule));
      work.score(tile, next, first, pieces, group, row_of, packed.rows);
      softmax();
      if (first) work.values.read(tile, next, there, dim);
      work.weigh(tile, next, first, seen.in(VALUE_TOKENS), group.count, acc, fresh);
      first = false;
    }
  }
}

// Computes one split of 512 keys for the rows of a piece; the state starts empty.
template <class T, class C, class B>
void attend_split(const Attention<T, C, B>& a, const Piece& piece, const PackedQueries<T, C, B>& packed, i64 split,
                  State state, const Tile<typename C::Stored>* after) {
  alignas(64) float totals[QUERY_ROWS * LANES];
  const Running running{state.high, totals, state.acc};
  const i64 rows = piece.rows(), first_new = a.first_new(piece.seq), key_end = first_new + piece.end;
  const i64 begin = first_tile(split, a.first_key(first_new + piece.begin)), end = (split + 1) * KEY_SPLIT;
  running.start(rows);
  attend_tiles(a, piece, packed, begin, key_end < end ? key_end : end, running, after);
  for (i64 r = 0; r < rows; ++r) state.high[r] *= a.unit(), state.total[r] = sum(load(totals + r * LANES));
}

// Merges one more split into the state `high`, `total`, `acc`.
INLINE void merge_row(float& high, float& total, float* acc, float split_high, float split_total,
                      const float* split_acc, i64 dim) {
  if (split_high == MINUS_INF) return;
  if (high == MINUS_INF) {
    high = split_high, total = split_total;
    memcpy(acc, split_acc, dim * sizeof(float));
    return;
  }
  float top = fmaxf(high, split_high);
  float old_factor = exp(high - top), new_factor = exp(split_high - top);
  for (i64 d = 0; d < dim; d += LANES)
    store(acc + d, fma(load(split_acc + d), set1(new_factor), mul(load(acc + d), set1(old_factor))));
  total = total * old_factor + split_total * new_factor;
  high = top;
}

// Adds the sink's share, divides, and writes a row of out.
template <class T, class C, class B>
INLINE void finish_row(const Attention<T, C, B>& a, i64 token, i64 head, float high, float total, const float* acc) {
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
template <class T, class C, class B>
INLINE void split_range(const Attention<T, C, B>& a, const Piece& piece, i64& begin, i64& end) {
  const i64 first_new = a.first_new(piece.seq);
  begin = a.first_key(first_new + piece.begin) / KEY_SPLIT;
  end = (first_new + piece.end + KEY_SPLIT - 1) / KEY_SPLIT;
}

template <class T, class C, class B>
void attend_piece(const Attention<T, C, B>& a, const Piece& piece) {
  i64 dim = a.v_dim(), rows = piece.rows(), begin, end;
  alignas(64) float acc[QUERY_ROWS * MAX_HEAD_DIM], split_acc[QUERY_ROWS * MAX_HEAD_DIM];
  float high[QUERY_ROWS], total[QUERY_ROWS], split_high[QUERY_ROWS], split_total[QUERY_ROWS];
  split_range(a, piece, begin, end);
  const PackedQueries<T, C, B> packed(a, piece);
  Tile<typename C::Stored> next;
  for (i64 split = begin; split < end; ++split) {
    const bool is_last = split + 1 == end;
    if (!is_last) next = tile_at(a, piece, (split + 1) * KEY_SPLIT);
    const bool is_first = split == begin;
    const State into = is_first ? State{high, total, acc} : State{split_high, split_total, split_acc};
    attend_split(a, piece, packed, split, into, is_last ? nullptr : &next);
    for (i64 r = 0; r < rows && !is_first; ++r)
      merge_row(high[r], total[r], acc + r * dim, split_high[r], split_total[r], split_acc + r * dim, dim);
  }
  i64 token = a.query_start_loc[piece.seq] + piece.begin, first_head = piece.head * a.group() + piece.first;
  for (i64 r = 0; r < rows; ++r)
    finish_row(a, token + r / piece.heads, first_head + r % piece.heads, high[r], total[r], acc + r * dim);
}

// Computes `count` sequences from `seq` on, of one new token each, whose first `shared` keys (whole tiles) are the
// same: these are read once for all of them. A row is computed exactly as it would be alone.
template <class T, class C, class B>
void attend_shared(const Attention<T, C, B>& a, i64 seq, i64 count, i64 index, i64 shared) {
  const Piece all = piece_of(a, seq, index, 0, count);
  const i64 dim = a.v_dim(), rows = all.rows(), heads = all.heads;
  alignas(64) float acc[QUERY_ROWS * MAX_HEAD_DIM], split_acc[QUERY_ROWS * MAX_HEAD_DIM], totals[QUERY_ROWS * LANES];
  float high[QUERY_ROWS], total[QUERY_ROWS], split_high[QUERY_ROWS];
  const Running running{split_high, totals, split_acc};
  for (i64 r = 0; r < rows; ++r) high[r] = MINUS_INF, total[r] = 0.0f;
  const PackedQueries<T, C, B> packed(a, all);
  i64 longest = 0;
  for (i64 i = 0; i < count; ++i) longest = a.seq_lens[seq + i] > longest ? a.seq_lens[seq + i] : longest;
  for (i64 begin = 0; begin < longest; begin += KEY_SPLIT) {
    const i64 end = begin + KEY_SPLIT,
              own = begin < shared ? shared : begin;  // own: where each sequence continues alone
    running.start(rows);
    if (begin < shared) attend_tiles(a, all, packed, begin, shared < end ? shared : end, running, nullptr);
    for (i64 i = 0; i < count; ++i) {
      const i64 length = a.seq_lens[seq + i], stop = length < end ? length : end;
      const Piece one = piece_of(a, seq + i, index, 0, 1);
      if (own < stop)
        attend_tiles(a, one, PackedQueries<T, C, B>(a, one), own, stop, running.from(i * heads, dim), nullptr);
      for (i64 r = i * heads; r < (i + 1) * heads && begin < length; ++r)
        merge_row(high[r], total[r], acc + r * dim, split_high[r] * a.unit(), sum(load(totals + r * LANES)),
                  split_acc + r * dim, dim);
    }
  }
  for (i64 r = 0; r < rows; ++r)
    finish_row(a, a.query_start_loc[seq] + r / heads, all.head * a.group() + all.first + r % heads, high[r], total[r],
               acc + r * dim);
}

// Consecutive sequences whose first blocks are the same: for each leading one, their `count` and their common keys.
struct Sharing {
  i64 leaders, *seq, *count, *keys;
};

// most: the most sequences that are grouped.
template <class T, class C, class B>
INLINE void find_sharing(const Attention<T, C, B>& a, i64 most, Sharing& found) {
  auto common = [&](i64 one, i64 other) {
    const i32 *x = a.block_table + one * a.max_blocks, *y = a.block_table + other * a.max_blocks;
    const i64 shorter = a.seq_lens[one] < a.seq_lens[other] ? a.seq_lens[one] : a.seq_lens[other];
    i64 blocks = 0;
    while (blocks < shorter / a.cache.block_size && x[blocks] == y[blocks]) ++blocks;
    return blocks * a.cache.block_size / KEY_TILE * KEY_TILE;
  };
  found.leaders = 0;
  for (i64 seq = 0; seq < a.num_seqs; ++seq) {
    const i64 last = found.leaders - 1;
    if (last >= 0 && found.count[last] < most) {
      const i64 keys = common(found.seq[last], seq);
      // A sequence with few common keys would reduce what the others share.
      if (keys > 0 && 2 * keys >= found.keys[last]) {
        ++found.count[last];
        found.keys[last] = found.count[last] == 2 || keys < found.keys[last] ? keys : found.keys[last];
        continue;
      }
    }
    found.seq[found.leaders] = seq, found.count[found.leaders] = 1, found.keys[found.leaders++] = 0;
  }
}

// Decode of few sequences: every split of every (sequence, part of heads) is a piece of its own, merged after a
// barrier.
template <class T, class C, class B>
void attend_by_splits(Team& team, const Attention<T, C, B>& a, i64 max_splits) {
  i64 most = a.part_size(), dim = a.v_dim(), parts = a.cache.heads * a.parts(), row_size = dim + 2;
  auto partial = [&](i64 pair, i64 split) { return a.partials + (pair * max_splits + split) * most * row_size; };
  auto state = [&](float* data) { return State{data, data + most, data + 2 * most}; };
  team.each(a.num_seqs * parts * max_splits, 1, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      Piece piece = piece_of(a, i / max_splits / parts, i / max_splits % parts, 0, 1);
      i64 first, last, split = i % max_splits;
      split_range(a, piece, first, last);
      if (split >= first && split < last)
        attend_split(a, piece, PackedQueries<T, C, B>(a, piece), split, state(partial(i / max_splits, split)), nullptr);
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

// The keys that one token sees, from the start of a tile on, in pieces of 16.
template <class T, class C, class B>
struct KeySpan {
  i64 begin, end, start, count;
  INLINE KeySpan(const Attention<T, C, B>& a, i64 position)
      : begin(a.first_key(position)), end(position + 1), start(begin / KEY_TILE * KEY_TILE),
        count((end - start + KEY_TILE - 1) / KEY_TILE * PIECES) {}
};

// Adds to `masses` the attention probability that a piece of one token gives to each block, as an integer, so that the
// order of tokens, layers and heads does not matter. For each head and 16 keys, the highest score and the sum relative
// to it are kept until the overall maximum is known.
template <class T, class C, class B>
void count_masses(const Attention<T, C, B>& a, const Piece& piece) {
  const auto [begin, end, start, count] = KeySpan<T, C, B>(a, a.first_new(piece.seq) + piece.end - 1);
  float* highs = static_cast<float*>(__builtin_alloca(size_t(2 * piece.heads * count) * sizeof(float)));
  float* sums = highs + piece.heads * count;
  const Vec unit = set1(a.unit());
  const Queries<T, C, B> row_of(a, piece);
  const PackedQueries<T, C, B> packed(a, piece);
  TileWork<T, C, B> work(a);
  for (i64 key = start; key < end; key += KEY_TILE) {
    const Tile<typename C::Stored> tile = tile_at(a, piece, key);
    const Range seen{begin > key ? begin - key : 0, end - key < KEY_TILE ? end - key : KEY_TILE};
    const Range pieces = seen.in(16).rounded_to(a.granule);
    work.keys.read(tile, nullptr, pieces);
    for (i64 row = 0; row < piece.heads; row += work.at_once) {
      const i64 rows = piece.heads - row < work.at_once ? piece.heads - row : work.at_once;
      const RowGroup<T, C, B> of{a, row, rows, piece.heads, end - 1, key, piece.head * a.group() + piece.first};
      work.score(tile, nullptr, false, pieces, of, row_of, packed.rows);
      for (i64 r = 0; r < rows; ++r)
        for (i64 p = 0; p < PIECES; ++p) {
          const i64 at = (row + r) * count + (key - start) / 16 + p;
          highs[at] = MINUS_INF, sums[at] = 0.0f;
          const int low = int(seen.first - p * 16), high = int(seen.last - p * 16);
          if (low >= 16 || high <= 0) continue;
          const Vec products = load(work.scores + r * KEY_TILE + p * 16);
          const Vec s = of.scores_of(r).score(by_scales<typename C::Stored>(products, tile.key_scales[p]), int(p));
          highs[at] = maximum(keep(s, low, high, set1(MINUS_INF)));
          sums[at] = sum(keep(exp(mul(sub(s, set1(highs[at])), unit)), low, high, zero()));
        }
    }
  }
  i64* const masses = a.masses + piece.seq * a.max_blocks;
  const i64 of_block = a.cache.block_size / 16;
  for (i64 r = 0; r < piece.heads; ++r) {
    const float *high = highs + r * count, *part = sums + r * count;
    float top = MINUS_INF, total = 0.0f;
    for (i64 p = 0; p < count; ++p) top = fmaxf(top, high[p]);
    auto weight = [&](i64 p) { return part[p] > 0.0f ? part[p] * exp((high[p] - top) * a.unit()) : 0.0f; };
    for (i64 p = 0; p < count; ++p) total += weight(p);
    if (a.sinks) total += exp(to_float(a.sinks[piece.head * a.group() + piece.first + r]) - top * a.unit());
    for (i64 p = 0; p < count;) {
      const i64 block = (start / 16 + p) / of_block;
      float mass = 0.0f;
      for (; p < count && (start / 16 + p) / of_block == block; ++p) mass += weight(p);
      const i64 counted = i64(double(mass / total) * MASS_OF_ONE);
      if (counted > 0) __atomic_fetch_add(masses + block, counted, __ATOMIC_RELAXED);
    }
  }
}

// Computes the masses of all tokens that count, for a few heads at a time where there are many keys.
template <class T, class C, class B>
void count_masses(Team& team, const Attention<T, C, B>& a) {
  constexpr i64 room = 1 << 16;  // floats on a thread's stack, not counting those of one head
  const i64 parts = a.cache.heads * a.parts();
  i64 rows = 0;
  for (i64 seq = 0; seq < a.num_seqs; ++seq) rows += a.query_start_loc[seq + 1] - a.mass_from[seq];
  team.each(rows * parts, 1, [&](i64 index, i64) {
    i64 seq = 0, row = index / parts;
    while (row >= a.query_start_loc[seq + 1] - a.mass_from[seq])
      row -= a.query_start_loc[seq + 1] - a.mass_from[seq], ++seq;
    const i64 token = a.mass_from[seq] + row - a.query_start_loc[seq];
    const Piece all = piece_of(a, seq, index % parts, token, token + 1);
    const i64 fit = room / (2 * KeySpan<T, C, B>(a, a.first_new(seq) + token).count), at_once = fit > 1 ? fit : 1;
    for (i64 head = 0; head < all.heads; head += at_once) {
      Piece some = all;
      some.first += head, some.heads = all.heads - head < at_once ? all.heads - head : at_once;
      count_masses(a, some);
    }
  });
}

template <class A>
INLINE void attend_all(Team& team, const A& a) {
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
  // Sequences can share keys only without a bias, since the distance from a shared key differs between their queries.
  if constexpr (!A::biased)
    if (new_tokens == a.num_seqs && a.num_seqs > 1 && a.mask == CAUSAL) {
      const i64 enough = a.num_seqs * parts / (2 * team.count);  // group sizes that leave work for all threads
      i64* room = static_cast<i64*>(__builtin_alloca(size_t(3 * a.num_seqs) * sizeof(i64)));
      Sharing sharing{0, room, room + a.num_seqs, room + 2 * a.num_seqs};
      find_sharing(a, enough < tile ? enough : tile, sharing);
      if (sharing.leaders < a.num_seqs)
        return team.each(sharing.leaders * parts, 1, [&](i64 index, i64) {
          const i64 group = index / parts, part = index % parts;
          if (sharing.count[group] > 1)
            attend_shared(a, sharing.seq[group], sharing.count[group], part, sharing.keys[group]);
          else attend_piece(a, piece_of(a, sharing.seq[group], part, 0, 1));
        });
    }
  // Backwards, so that the longest pieces of a prompt (its last tokens) start first.
  i64 seq = a.num_seqs, base = pieces;
  team.each(pieces, 1, [&](i64 begin, i64) {
    i64 piece = pieces - 1 - begin;
    while (piece < base) base -= tiles(--seq) * parts;
    i64 count = a.query_start_loc[seq + 1] - a.query_start_loc[seq];
    // All pieces of a KV head are consecutive: its K and V then stay in the second-level cache.
    i64 part = (piece - base) / tiles(seq), token = (piece - base) % tiles(seq) * tile;
    attend_piece(a, piece_of(a, seq, part, token, token + tile < count ? token + tile : count));
  });
}

template <class A>
KERNEL void paged_attention(Team& team, const A& a) {
  if (a.echoes.count) echo_slots(team, a.cache, a.echoes);
  attend_all(team, a);
  if (a.masses) count_masses(team, a);
}

}  // namespace inferc
