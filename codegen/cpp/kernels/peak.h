// The peak that products are measured against: the arithmetic of threads that nothing else slows down.
#pragma once
#include "amx.h"
#include "dot.h"
#include "team.h"

namespace inferc {

#if defined(__AVX512F__)
constexpr int BUSY_ROWS = 12;
#else
constexpr int BUSY_ROWS = 5;  // as many sums as the registers hold
#endif

// Fills `to` with numbers of either sign whose bits vary as those of weights do. A processor that multiplies zeros
// draws less power, and may run at a clock that no product reaches (3.1 against 2.2 TFLOP/s per core were measured).
template <class T>
INLINE void fill_with_numbers(T* to, i64 count) {
  u32 state = 1;
  for (i64 i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    if constexpr (std::is_same_v<T, bf16>) to[i].bits = u16(0x3f00 | (state >> 16 & 0x807f));  // from 0.5 to 1
    else to[i] = T(state >> 24);
  }
}

// Multiplies `rounds` lines of weights, all the same line, by rows in registers; returns the number of operations.
template <class T>
__attribute__((noinline)) i64 busy(i64 rounds) {
  alignas(64) T line[16 * Dot<T>::unit];
  alignas(64) float results[16] = {};
  fill_with_numbers(line, 16 * Dot<T>::unit);
  asm volatile("" : "+m"(line));  // hides the value from the compiler
  typename Dot<T>::Sum sums[BUSY_ROWS];
  for (auto& sum : sums) sum = Dot<T>::start(0, results, true);
  auto row = Dot<T>::left(line);
  for (i64 i = 0; i < rounds; ++i) {
    const T* next = line;
    asm volatile("" : "+r"(next));  // makes the compiler load it again, as another line would be
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

// The peak on tiles: two tiles of rows times two tiles of weights; returns the number of operations.
template <class T>
__attribute__((noinline)) i64 busy_tiles(i64 rounds) {
  constexpr i64 size = TILE_BYTES / i64(sizeof(T));
  alignas(64) T tiles[6 * size];
  fill_with_numbers(tiles, 6 * size);
  shape_tiles(TILE_HEIGHT, TILE_HEIGHT);
  amx::zero<0>();
  amx::zero<1>();
  amx::zero<2>();
  amx::zero<3>();
  amx::load<4>(tiles, TILE_LINE);
  amx::load<5>(tiles + size, TILE_LINE);
  for (i64 i = 0; i < rounds; ++i) {
    const T* weights = tiles + (2 + i % 2 * 2) * size;
    amx::load<6>(weights, TILE_LINE);
    amx::load<7>(weights + size, TILE_LINE);
    amx::dot<0, 4, 6>(tiles);
    amx::dot<1, 4, 7>(tiles);
    amx::dot<2, 5, 6>(tiles);
    amx::dot<3, 5, 7>(tiles);
  }
  release_tiles();
  return rounds * 4 * TILE_HEIGHT * TILE_HEIGHT * (TILE_LINE / i64(sizeof(T))) * 2;
}

// The operations of all threads together.
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
