// The tile registers of AMX, and the operations on them.
// Each of the eight registers holds up to 16 rows of up to 64 bytes. Here registers 0 to 3 hold sums, 2 * m + p those
// of row tile m and panel p; 4 and 5 hold rows, 6 and 7 weights. Every 1024 bytes of a panel are a tile of weights as
// stored.
#pragma once
#include "simd.h"

namespace inferc {

#if defined(__AMX_TILE__) || defined(INFERC_AMX_EMULATED)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif
constexpr i64 TILE_HEIGHT = 16, TILE_LINE = 64, TILE_BYTES = TILE_HEIGHT * TILE_LINE;

// The configuration that ldtilecfg reads.
struct TileConfig {
  u8 palette, start_row, reserved[14];
  u16 bytes[8];  // bytes of a row of each tile
  u8 more_reserved[16];
  u8 rows[8];
  u8 last_reserved[8];
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace inferc

#ifdef INFERC_AMX_EMULATED
#include "amx_emulated.h"
#else

// In assembly, since the intrinsics of g++ 12 do not tell the compiler what memory they read (it then drops the stores
// that were to fill it), and take no template parameter for a register.
namespace inferc::amx {

INLINE void configure(const TileConfig& config) { asm volatile("ldtilecfg\t%0" ::"m"(config)); }
INLINE void release() { asm volatile("tilerelease"); }
template <int T>
INLINE void zero() {
  asm volatile("tilezero\t%%tmm%c0" ::"i"(T));
}
template <int T>
INLINE void load(const void* from, i64 stride) {
  asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// Loads a tile that is not read again soon, so that it does not displace others from the first-level cache.
template <int T>
INLINE void stream(const void* from, i64 stride) {
  asm volatile("tileloaddt1\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void store(void* to, i64 stride) {
  asm volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// Adds the product of tiles A and B to tile C: of pairs of bf16, or of groups of four int8.
template <int C, int A, int B>
INLINE void dot(const bf16*) {
  asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void dot(const i8*) {
  asm volatile("tdpbssd\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace inferc::amx
#endif

namespace inferc {

// The configuration of this thread's tiles.
struct TileShape {
  i64 first, second, line;
};
constinit inline thread_local TileShape tile_shape{0, 0, 0};

// Makes the row tiles `first` and, unless it is 0, `second` rows high, with `line` bytes in each row. Fewer rows take
// less time. An unchanged configuration is not loaded again, since that takes time and clears all tiles.
INLINE void shape_tiles(i64 first, i64 second, i64 line = TILE_LINE) {
  TileShape& now = tile_shape;
  if (now.line == line && now.first == first && (now.second == second || second == 0)) return;
  now = {first, second, line};
  TileConfig config = {};
  config.palette = 1;
  auto set = [&](int tile, i64 rows, i64 bytes) {
    config.rows[tile] = u8(rows);
    config.bytes[tile] = u16(rows ? bytes : 0);
  };
  for (int m = 0; m < 2; ++m) {
    const i64 rows = m ? second : first;
    set(2 * m, rows, TILE_LINE);
    set(2 * m + 1, rows, TILE_LINE);
    set(4 + m, rows, line);
    set(6 + m, line / 4, TILE_LINE);
  }
  amx::configure(config);
}

// Releases the tiles: a thread that sleeps with tiles in use costs more to switch, and code outside configures its own.
INLINE void release_tiles() {
  if constexpr (AMX) {
    if (tile_shape.line) amx::release();
    tile_shape = {0, 0, 0};
  }
}

}  // namespace inferc
