// What amx.h takes from the processor, in plain C++ for machines without tiles: a file of registers for each thread,
// with the checks that the processor makes. What would be a fault there ends the process with a line that says why.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, LDTILECFG, TILELOADD, TDPBF16PS, TDPBSSD.
#pragma once
#include <stdio.h>
#include <stdlib.h>

namespace inferc::amx {

struct TileFile {
  bool configured;
  TileConfig config;
  alignas(64) u8 data[8][16][64];
};
constinit inline thread_local TileFile tile_file{};

inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated tiles: %s\n", what);
  abort();
}

inline bool all_zero(const u8* bytes, i64 count) {
  for (i64 i = 0; i < count; ++i)
    if (bytes[i]) return false;
  return true;
}

inline void configure(const TileConfig& config) {
  require(config.palette == 1 && config.start_row == 0, "palette 1 from row 0 on is all that there is");
  require(all_zero(config.reserved, 14) && all_zero(config.more_reserved, 16) && all_zero(config.last_reserved, 8),
          "reserved bytes of the configuration are not 0");
  for (int t = 0; t < 8; ++t) {
    require(config.rows[t] <= 16 && config.bytes[t] <= 64, "a tile has at most 16 rows of 64 bytes");
    require((config.rows[t] == 0) == (config.bytes[t] == 0), "a tile has rows without bytes or bytes without rows");
  }
  tile_file = {true, config, {}};
}

inline void release() { tile_file = {}; }

inline u8 (*used(int t))[64] {
  require(tile_file.configured, "no configuration");
  require(tile_file.config.rows[t] > 0, "the tile is not configured");
  return tile_file.data[t];
}

template <int T>
void zero() {
  memset(used(T), 0, 16 * 64);
}

template <int T>
void load(const void* from, i64 stride) {
  u8(*tile)[64] = used(T);
  memset(tile, 0, 16 * 64);
  for (int r = 0; r < tile_file.config.rows[T]; ++r)
    memcpy(tile[r], static_cast<const u8*>(from) + r * stride, tile_file.config.bytes[T]);
}

template <int T>
void stream(const void* from, i64 stride) {
  load<T>(from, stride);
}

template <int T>
void store(void* to, i64 stride) {
  const u8(*tile)[64] = used(T);
  for (int r = 0; r < tile_file.config.rows[T]; ++r)
    memcpy(static_cast<u8*>(to) + r * stride, tile[r], tile_file.config.bytes[T]);
}

template <int C, int A, int B>
void check_dot() {
  static_assert(C != A && A != B && B != C, "three tiles");
  used(C), used(A), used(B);
  const TileConfig& config = tile_file.config;
  require(config.bytes[A] % 4 == 0 && config.bytes[B] % 4 == 0 && config.bytes[C] % 4 == 0, "a row of no whole fours");
  require(config.rows[C] == config.rows[A], "sums and rows differ in height");
  require(config.bytes[C] == config.bytes[B], "sums and weights differ in width");
  require(config.bytes[A] == 4 * config.rows[B], "rows and weights differ in k");
}

// A denormal is zero, as a factor and as a result.
INLINE float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
INLINE float flushed(const u8* half) {
  bf16 x;
  memcpy(&x, half, 2);
  return flushed(to_float(x));
}

// Products at even and at odd k are summed apart, each by a fused multiply-add, then the two sums added, then that to
// C.
template <int C, int A, int B>
void dot(const bf16*) {
  check_dot<C, A, B>();
  const u8(*left)[64] = tile_file.data[A];
  const u8(*right)[64] = tile_file.data[B];
  const int width = tile_file.config.bytes[C] / 4, pairs = tile_file.config.rows[B];
  float even[16][16], odd[16][16];  // the weights, unpacked once
  for (int k = 0; k < pairs; ++k)
    for (int n = 0; n < 16; ++n) even[k][n] = flushed(right[k] + 4 * n), odd[k][n] = flushed(right[k] + 4 * n + 2);
  for (int m = 0; m < tile_file.config.rows[C]; ++m) {
    float first[16] = {}, second[16] = {}, sums[16];
    for (int k = 0; k < pairs; ++k) {
      const float a = flushed(left[m] + 4 * k), b = flushed(left[m] + 4 * k + 2);
      for (int n = 0; n < 16; ++n) first[n] = flushed(__builtin_fmaf(a, even[k][n], first[n]));
      for (int n = 0; n < 16; ++n) second[n] = flushed(__builtin_fmaf(b, odd[k][n], second[n]));
    }
    memcpy(sums, tile_file.data[C][m], 64);
    for (int n = 0; n < width; ++n) sums[n] = flushed(flushed(sums[n]) + flushed(first[n] + second[n]));
    memcpy(tile_file.data[C][m], sums, 64);
  }
}

template <int C, int A, int B>
void dot(const i8*) {
  check_dot<C, A, B>();
  const u8(*left)[64] = tile_file.data[A];
  const u8(*right)[64] = tile_file.data[B];
  const int width = tile_file.config.bytes[C] / 4, fours = tile_file.config.rows[B];
  for (int m = 0; m < tile_file.config.rows[C]; ++m) {
    i32 sums[16];
    memcpy(sums, tile_file.data[C][m], 64);
    for (int k = 0; k < fours; ++k)
      for (int n = 0; n < width; ++n) {
        u32 sum = u32(sums[n]);  // which wraps
        for (int i = 0; i < 4; ++i) sum += u32(i32(i8(left[m][4 * k + i])) * i8(right[k][4 * n + i]));
        sums[n] = i32(sum);
      }
    memcpy(tile_file.data[C][m], sums, 64);
  }
}

}  // namespace inferc::amx
