// The filters that leave a set with a hole or an upper end, on a copy of the row: typical-p, and exclude top choices.
// What they drop becomes -inf in the copy, RowWork::x, from which the token is then drawn.
#pragma once
#include "odds.h"

namespace inferc {

// Copies what a cut leaves to work.x, which may be the row itself. The cut was weighed.
INLINE Odds keep_cut(const Crew& crew, const Odds& odds, Cut cut, const RowWork& work) {
  const Vec above = set1(cut.above), none = set1(-__builtin_inff());
  const Parted& row = odds.row;
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    i64 ties = cut.ties;
    for (i64 before = 0; before < part; ++before) ties -= work.ties[before] < ties ? work.ties[before] : ties;
    for (; part < stop; ++part) {
      row.each(part, [&](i64 i) {
        const Vec x = row.at(i), p = odds.at(i);
        u32 lanes = lanes_less(above, p);
        u32 equal = ties > 0 ? lanes_at_least(p, above) & lanes_at_least(above, p) : 0;
        for (; equal && ties > 0; equal &= equal - 1, --ties) lanes |= equal & -equal;
        store(work.x + i, only(x, lanes, none));  // there is room behind the last
      });
    }
  });
  crew.meet();
  return {{work.x, row.n}, odds.top, odds.scale, -__builtin_inff()};
}

// Numbers y = (x - top) * scale, the logarithms of odds, by how far each is from a middle.
struct ByTypicality {
  using Sum = Wide;
  float middle;
  INLINE Vec key(Vec y) const {
    const Vec away = sub(y, set1(middle));
    return min(away, sub(zero(), away));
  }
  INLINE Vec weight(Vec y) const { return exp(y); }
};

// Keeps the tokens whose surprise is closest to the expected one, as few as have a share of the mass, and those as close
// as the last of these. -log p differs from its mean as y differs from its own.
// Source: Meister et al. 2022, Locally Typical Sampling, arXiv:2202.00666.
INLINE void keep_typical(const Crew& crew, const Odds& odds, float share, const RowWork& work) {
  const Parted& row = odds.row;
  const Vec top = set1(odds.top), scale = set1(odds.scale), none = set1(-__builtin_inff());
  double* moments = reinterpret_cast<double*>(work.list);
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part) {
      Wide mass = {}, moment = {};
      row.each(part, [&](i64 i) {
        const Vec y = mul(sub(row.at(i), top), scale), p = exp(y);
        mass = add(mass, p);
        moment = add(moment, less(zero(), p, mul(p, y), zero()));
      });
      work.mass[part] = sum(mass), moments[part] = sum(moment);
    }
  });
  crew.meet();
  double total = 0.0, moment = 0.0;
  for (i64 part = 0; part < row.parts(); ++part) total += work.mass[part], moment += moments[part];
  const ByTypicality by{float(moment / total)};
  crew.meet();  // all have read the moments
  if (crew.leads()) {
    i64 count = 0;
    for (i64 part = 0; part < row.parts(); ++part)
      row.each(part, [&](i64 i) {
        const Vec x = row.at(i);
        count += store_packed(work.list + count, mul(sub(x, top), scale), lanes_less(none, x));
      });
    *work.least = threshold(work.list, count, total * double(share), *work.above, by);
  }
  crew.meet();
  const Vec least = set1(*work.least);
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part)
      row.each(part, [&](i64 i) {
        const Vec x = row.at(i);
        store(work.x + i, only(x, lanes_at_least(by.key(mul(sub(x, top), scale)), least), none));
      });
  });
  crew.meet();
}

// Drops all tokens with at least a share of the mass but the least likely of them; of equal ones the last id stays.
INLINE void exclude_top(const Crew& crew, const Odds& odds, float share, const RowWork& work) {
  const Parted& row = odds.row;
  const Vec infinite = set1(__builtin_inff()), none = set1(-__builtin_inff());
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part) work.mass[part] = weight_of(odds, part);
  });
  crew.meet();
  const Vec from = set1(float(total_mass(work, row.parts()) * double(share)));
  // Of each part: how many reach it, the least odds of these, and the place of the last that has them.
  i32 *counts = work.listed, *places = work.ties;
  float* least = work.list;
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part) {
      Vec lowest = infinite;
      counts[part] = 0;
      row.each(part, [&](i64 i) {
        const Vec p = odds.at(i);
        const u32 lanes = lanes_at_least(p, from) & lanes_less(zero(), p);
        counts[part] += __builtin_popcount(lanes);
        lowest = min(only(p, lanes, infinite), lowest);
      });
      least[part] = -maximum(sub(zero(), lowest));
      const Vec own = set1(least[part]);
      places[part] = 0;
      row.each(part, [&](i64 i) {
        const Vec p = odds.at(i);
        if (const u32 equal = lanes_at_least(p, own) & lanes_at_least(own, p))
          places[part] = i32(i) + 31 - __builtin_clz(equal);
      });
    }
  });
  crew.meet();
  i64 count = 0, stays = 0;
  float cut = __builtin_inff();
  for (i64 part = 0; part < row.parts(); ++part) {
    if (counts[part] && least[part] <= cut) cut = least[part], stays = places[part];
    count += counts[part];
  }
  crew.meet();  // all have read what the parts found
  if (count < 2) return;
  const Vec at = set1(cut);
  crew.share(row.parts(), [&](i64 part, i64 stop) {
    for (; part < stop; ++part)
      row.each(part, [&](i64 i) {
        u32 lanes = lanes_less(odds.at(i), at);
        if (i <= stays && stays < i + LANES) lanes |= 1u << (stays - i);
        store(work.x + i, only(row.at(i), lanes, none));
      });
  });
  crew.meet();
}

}  // namespace inferc
