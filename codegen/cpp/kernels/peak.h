// What products are measured against: the arithmetic that threads do when nothing else is in the way.
#pragma once
#include "amx.h"
#include "dot.h"
#include "team.h"

namespace inferc {

#if defined(__AVX512F__)
constexpr int BUSY_ROWS = 12;
#else
constexpr int BUSY_ROWS = 5;  // as many sums as registers hold
#endif

// `rounds` lines of weights, all the same one, times rows in registers; returns the operations.
template <class T>
__attribute__((noinline)) i64 busy(i64 rounds) {
  alignas(64) T line[16 * Dot<T>::unit] = {};
  alignas(64) float results[16];
  typename Dot<T>::Sum sums[BUSY_ROWS];
  for (auto& sum : sums) sum = Dot<T>::start(0, results, true);
  auto row = Dot<T>::left(line);
  for (i64 i = 0; i < rounds; ++i) {
    const T* next = line;
    asm volatile("" : "+r"(next));  // read anew, as another line would be
    auto b = Dot<T>::right(next);
    for (auto& sum : sums) sum = Dot<T>::step(sum, row, b);
  }
  for (auto& sum : sums) {
    if constexpr (std::is_same_v<T, i8>) store(static_cast<void*>(results), sum);
    else store(results, sum);
    asm volatile("" ::"m"(results));
  }
  return rounds * BUSY_ROWS * 16 * Dot<T>::unit * 2;
}

// The same with tiles: two of rows times two of weights.
template <class T>
__attribute__((noinline)) i64 busy_tiles(i64 rounds) {
  alignas(64) T tile[TILE_BYTES / sizeof(T)] = {};
  shape_tiles(TILE_HEIGHT, TILE_HEIGHT);
  amx::zero<0>();
  amx::zero<1>();
  amx::zero<2>();
  amx::zero<3>();
  amx::load<4>(tile, TILE_LINE);
  amx::load<5>(tile, TILE_LINE);
  for (i64 i = 0; i < rounds; ++i) {
    amx::load<6>(tile, TILE_LINE);
    amx::load<7>(tile, TILE_LINE);
    amx::dot<0, 4, 6>(tile);
    amx::dot<1, 4, 7>(tile);
    amx::dot<2, 5, 6>(tile);
    amx::dot<3, 5, 7>(tile);
  }
  release_tiles();
  return rounds * 4 * TILE_HEIGHT * TILE_HEIGHT * (TILE_LINE / i64(sizeof(T))) * 2;
}

// Of all threads together.
template <class T>
i64 busy_team(void* threads, i64 rounds) {
  std::atomic<i64> operations{0};
  auto region = [&](Team&) {
    if constexpr (AMX && sizeof(T) < 4) operations += busy_tiles<T>(rounds);
    else operations += busy<T>(rounds);
  };
  parallel(threads, region);
  return operations;
}

}  // namespace inferc
