// Expert dispatch and combine: tokens go to the ranks that hold their experts, and results come back. The references
// are in ops/collectives.py.
//
// Every rank has all tokens and the same routing, so each knows from the ids alone what it gets from which rank. A rank
// sends the tokens of its share, which is a range of rows.
#pragma once
#include "collectives.h"
#include "moe.h"

namespace inferc {

constexpr i64 MAX_RANKS = 64;  // ranks of a group: the ranks of a token are the bits of one word

// The ranks that hold each expert: table [experts, replicas] of ranks, then -1. A token's position selects the replica.
struct Placement {
  const i32* table;
  i64 experts, replicas;
  const i64* positions;

  INLINE i64 place(i64 expert, i64 token) const {
    const i32* ranks = table + expert * replicas;
    i64 count = 1;
    while (count < replicas && ranks[count] >= 0) ++count;
    return expert * replicas + positions[token] % count;
  }
  // For each place in the table, which of its rank's experts it is; a rank's experts are in ascending id.
  void number(i32* local) const {
    i32 held[MAX_RANKS] = {};
    for (i64 i = 0; i < experts * replicas; ++i) local[i] = table[i] < 0 ? -1 : held[table[i]]++;
  }
};

// Sets choices of experts that other ranks hold to -1, and those of this rank's experts to the rank's own numbers.
inline void expert_choose(Team& team, const Step& s, Rows<const i32> ids, i64 rows, i64 top_k, Placement where,
                          i32 group, Rows<i32> out) {
  char* at = s.scratch;
  i32* local = take<i32>(at, where.experts * where.replicas);
  if (team.tid == 0) where.number(local);
  team.barrier();
  i32 rank = i32(s.host->ranks[group]);
  team.each(rows, row_grain(top_k), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      for (i64 k = 0; k < top_k; ++k) {
        i64 place = where.place(ids[row][k], row);
        out[row][k] = where.table[place] == rank ? local[place] : -1;
      }
  });
}

// The plan of one exchange, made by thread 0 and read by all. exchange_work_bytes (calls/moe.py) gives the size of its
// scratch.
struct Exchange {
  const Step& s;
  Placement where;
  i64 rows, top_k, size;
  i32 group;
  i64 rank, first, last;  // this rank's share of the rows
  i64 *counts, *sent, *received, *send_offsets, *send_bytes, *receive_offsets, *receive_bytes;
  u64* ranks;      // [rows] the ranks that compute some of the row's choices
  i32* local;      // [experts * replicas] as in Placement
  i32* outgoing;   // rows of this rank's share, grouped by the rank that gets them
  i32* arriving;   // rows that come here, ascending, because the senders' shares follow one another
  char* room;      // the rest of the scratch

  Exchange(const Step& s_, Placement where_, i64 rows_, i64 top_k_, i64 size_, i32 group_)
      : s(s_), where(where_), rows(rows_), top_k(top_k_), size(size_), group(group_) {
    rank = s.host->ranks[group];
    first = share(rank);
    last = share(rank + 1);
    room = s.scratch;
    counts = take<i64>(room, 2);
    for (i64** each : {&sent, &received, &send_offsets, &send_bytes, &receive_offsets, &receive_bytes})
      *each = take<i64>(room, size);
    ranks = take<u64>(room, rows);
    local = take<i32>(room, where.experts * where.replicas);
    outgoing = take<i32>(room, most_out());
    arriving = take<i32>(room, rows);
  }
  // The first row of a rank's share: row r belongs to rank r * size / rows.
  INLINE i64 share(i64 of) const { return (of * rows + size - 1) / size; }
  INLINE i64 fan() const { return top_k < size ? top_k : size; }
  INLINE i64 most_out() const { return (rows / size + 1) * fan(); }
  INLINE i64 num_out() const { return counts[0]; }
  INLINE i64 num_in() const { return counts[1]; }

  void plan(Rows<const i32> ids) {
    where.number(local);
    for (i64 row = 0; row < rows; ++row) {
      ranks[row] = 0;
      for (i64 k = 0; k < top_k; ++k) ranks[row] |= u64(1) << where.table[where.place(ids[row][k], row)];
    }
    i64 out = 0, in = 0;
    for (i64 to = 0; to < size; ++to) {
      sent[to] = out;
      for (i64 row = first; row < last; ++row)
        if (ranks[row] >> to & 1) outgoing[out++] = i32(row);
      sent[to] = out - sent[to];
    }
    for (i64 from = 0; from < size; ++from) {
      received[from] = in;
      for (i64 row = share(from); row < share(from + 1); ++row)
        if (ranks[row] >> rank & 1) arriving[in++] = i32(row);
      received[from] = in - received[from];
    }
    counts[0] = out;
    counts[1] = in;
  }
  // Called by all threads; `out` and `in` count the rows that go to and come from each rank.
  void run(Team& team, const char* send, const i64* out, char* receive, const i64* in, i64 row_bytes) {
    team.barrier();
    if (team.tid == 0) {
      i64 sent_to_here = 0, received_to_here = 0;
      for (i64 each = 0; each < size; ++each) {
        send_offsets[each] = sent_to_here;
        receive_offsets[each] = received_to_here;
        sent_to_here += send_bytes[each] = out[each] * row_bytes;
        received_to_here += receive_bytes[each] = in[each] * row_bytes;
      }
      call(send, receive);
    }
    team.barrier();
  }
  void call(const char* send, char* receive) {
    InfercExchange what{send, receive, send_offsets, send_bytes, receive_offsets, receive_bytes};
    const Waiting ranks;
    s.host->collective(s.host->context, INFERC_EXCHANGE, group, &what, size);
  }
};

// A row in transit: x, the numbers of its experts on that rank, their weights.
template <class T>
INLINE i64 parcel_bytes(i64 hidden, i64 top_k) {
  return (hidden * i64(sizeof(T)) + top_k * 8 + 7) / 8 * 8;
}

template <class T>
KERNEL void expert_dispatch(Team& team, Exchange e, Rows<const T> x, Rows<const i32> ids, Rows<const float> weights,
                            i64 hidden, Rows<T> out, Rows<i32> out_ids, Rows<float> out_weights) {
  if (team.tid == 0) e.plan(ids);
  team.barrier();
  const i64 bytes = parcel_bytes<T>(hidden, e.top_k), of_x = hidden * i64(sizeof(T)), of_ids = e.top_k * 4;
  char* send = take<char>(e.room, e.most_out() * bytes);
  char* receive = take<char>(e.room, e.rows * bytes);
  team.each(e.num_out(), row_grain(hidden), [&](i64 begin, i64 end) {
    i64 to = 0, until = e.sent[0];
    for (i64 i = begin; i < end; ++i) {
      while (i >= until) until += e.sent[++to];
      i64 row = e.outgoing[i];
      char* parcel = send + i * bytes;
      memcpy(parcel, x[row], of_x);
      for (i64 k = 0; k < e.top_k; ++k) {
        i64 place = e.where.place(ids[row][k], row);
        i32 id = e.where.table[place] == to ? e.local[place] : -1;
        memcpy(parcel + of_x + k * 4, &id, 4);
      }
      memcpy(parcel + of_x + of_ids, weights[row], of_ids);
    }
  });
  e.run(team, send, e.sent, receive, e.received, bytes);
  team.each(e.rows, row_grain(hidden), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      if (i < e.num_in()) {
        const char* parcel = receive + i * bytes;
        memcpy(out[i], parcel, of_x);
        memcpy(out_ids[i], parcel + of_x, of_ids);
        memcpy(out_weights[i], parcel + of_x + of_ids, of_ids);
      } else {
        memset(out[i], 0, of_x);
        for (i64 k = 0; k < e.top_k; ++k) out_ids[i][k] = -1, out_weights[i][k] = 0.0f;
      }
    }
  });
}

// Only `out` must be contiguous: it has a place of its own.
template <class T>
KERNEL void expert_combine(Team& team, Exchange e, Rows<const T> y, Rows<const i32> ids, i64 hidden, Rows<T> out) {
  if (team.tid == 0) e.plan(ids);
  team.barrier();
  const i64 bytes = hidden * i64(sizeof(T)), own = e.last - e.first;
  char* send = take<char>(e.room, e.rows * bytes);
  char* receive = take<char>(e.room, e.most_out() * bytes);
  float* sums = take<float>(e.room, own * hidden);
  team.each(e.num_in(), row_grain(hidden), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) memcpy(send + i * bytes, y[i], bytes);
  });
  e.run(team, send, e.received, receive, e.sent, bytes);
  // Each thread adds some columns of all rows; the parts of a row are added in the order of their ranks.
  constexpr i64 COLUMNS = 128;
  team.each((hidden + COLUMNS - 1) / COLUMNS, 1, [&](i64 piece, i64) {
    i64 begin = piece * COLUMNS, end = begin + COLUMNS < hidden ? begin + COLUMNS : hidden;
    for (i64 row = 0; row < own; ++row) memset(sums + row * hidden + begin, 0, (end - begin) * 4);
    for (i64 i = 0; i < e.num_out(); ++i) {
      const T* part = reinterpret_cast<const T*>(receive + i * bytes);
      float* sum = sums + (e.outgoing[i] - e.first) * hidden;
      for (i64 c = begin; c < end; c += LANES)
        store(sum + c, add(load(sum + c, end - c), load(part + c, end - c)), end - c);
    }
    for (i64 row = 0; row < own; ++row)
      for (i64 c = begin; c < end; c += LANES)
        store(out[e.first + row] + c, load(sums + row * hidden + c, end - c), end - c);
  });
  team.barrier();
  if (team.tid == 0) {  // every rank gets every share
    for (i64 each = 0; each < e.size; ++each) {
      e.send_offsets[each] = 0;
      e.send_bytes[each] = own * bytes;
      e.receive_offsets[each] = e.share(each) * bytes;
      e.receive_bytes[each] = (e.share(each + 1) - e.share(each)) * bytes;
    }
    e.call(reinterpret_cast<const char*>(out[e.first]), reinterpret_cast<char*>(out[0]));
  }
  team.barrier();
}

}  // namespace inferc
