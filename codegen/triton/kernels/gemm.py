"""The code that matrix products share: how they are cut into tiles, the order of their programs, and the loop over k.

Each element is summed in one accumulator, with k ascending and without split-k. So the bits of a row depend neither on
the other rows nor on their number, as long as tiles are cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

ROW_BOUNDS = (16, 32, 64, 128, None)
"""The most rows that each variant of a product is for. The last variant is for any number of rows."""

# Shared memory of a block: it fits chips with 100 KB, and two blocks fit a multiprocessor of Hopper.
SHARED_BYTES = 96 << 10


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, and how it computes it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    few: bool  # whether all rows of a step are in one program

    @property
    def constants(self) -> dict[str, int | float]:
        """The constants of a kernel that computes a product in tiles of this size."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "FEW": int(self.few), "WIDE_DOT": 0}

    @property
    def stack_bytes(self) -> int:
        """The bytes of a thread's registers that ptxas may spill.

        On Blackwell it spills two sums per thread after the loop, for tiles of 64 rows and more, although registers are
        free.
        """
        return 16 if self.block_m >= 64 else 0

    def grid(self, column_tiles: str, rows: str) -> tuple[str, str, str]:
        """Return the grid of a launch over a step's `rows`, which is "tokens" or "rows"."""
        return column_tiles if self.few else f"{column_tiles} * ceil_div(num_{rows}, BLOCK_M)", "1", "1"


def tile(n: int, k: int, dtype: str, int8: bool, up_to: int | None, columns: tuple[int, int] = (16, 128)) -> Tile:
    """Return how x [rows, k] @ weight [n, k].T is cut into tiles, for at most `up_to` rows.

    `up_to` is a power of two from 16 to 128, or None for any number of rows. `columns` is the least and the largest
    width of a tile, both powers of two.

    With few rows, only the bandwidth at which the weights are read matters. To keep an H100's memory busy, each of its
    132 multiprocessors needs about 20 KB in flight, better twice as much. So tiles are as wide as possible while each
    multiprocessor has one, and as many of them are buffered as SHARED_BYTES holds. That is mostly 32 to 64 KB of
    weights per block, of which one tile is in use. Tiles are as long as leaves room for four of them: that reads 128 to
    512 contiguous bytes of each row, and needs few barriers. All programs read x from an L2 cache that is only about
    twice as fast as the memory. So from 64 rows on, tiles are about as wide as high, although that leaves half of the
    multiprocessors without a tile where n is 4096.

    For any number of rows, the tensor cores matter: tiles are the largest ones of which two fit on a multiprocessor.
    float32 is multiplied without tensor cores, and not meant to be fast.
    """
    least, most = columns
    if dtype == "float32":
        block_m, block_n = 16 if up_to == 16 else 32, max(least, min(most, 32))
        return Tile(block_m, block_n, 32, 4, 2, up_to is not None and up_to <= block_m)
    block_m, block_n = up_to or 128, 16
    widest, programs = (64, 128) if block_m < 64 else (128, 64)
    while block_n < widest and (up_to is None or n >= 2 * block_n * programs):
        block_n *= 2
    block_n = max(least, min(most, block_n))
    few = up_to is not None
    if block_m * block_n > 128 * 128:  # registers hold no more sums
        block_m, few = 64, few and block_m <= 64
    lengths = [each for each in (256, 128, 64, 32) if k % each == 0] or [64]
    least_buffers = 4 if block_m * block_n < 128 * 128 else 3
    fit = [each for each in lengths if _buffers(block_m, block_n, each, int8) >= least_buffers]
    block_k = fit[0] if fit else lengths[-1]
    # From 64 rows on, Hopper's tensor cores read a tile from its buffer, which is then in use for one stage longer.
    num_stages = min(12, _buffers(block_m, block_n, block_k, int8)) + (block_m < 64)
    return Tile(block_m, block_n, block_k, _num_warps(block_m, block_n, int8), num_stages, few)


def _num_warps(block_m: int, block_n: int, int8: bool) -> int:
    if (block_m, block_n) == (16, 16):  # only two tiles of the tensor cores
        return 2
    if int8 and (block_m, block_n) == (32, 32):  # pairs of warps convert the same weights: more warps hide that
        return 8
    return 8 if block_m == 128 or block_m * block_n > 64 * 128 else 4


def _buffers(block_m: int, block_n: int, block_k: int, int8: bool) -> int:
    """Return how many tiles of x and the weight shared memory holds.

    For products of 64 rows and more, an int8 weight is converted to one more tile in shared memory, which has to fit
    too.
    """
    weight = block_n * block_k
    converted = 2 * weight if int8 and block_m >= 64 else 0
    return (SHARED_BYTES - converted) // (2 * block_m * block_k + (weight if int8 else 2 * weight))


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(rows, COLUMN_TILES: tl.constexpr, BLOCK_M: tl.constexpr, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's tile of rows and its tile of columns.

    Eight tiles of rows are multiplied by one tile of the weight while it is in the L2 cache, before the next one is
    read.
    """
    program = tl.program_id(0)
    row_tile, column_tile = 0, program
    if not FEW:
        first = program // (8 * COLUMN_TILES) * 8
        together = tl.minimum(tl.cdiv(rows, BLOCK_M) - first, 8)
        row_tile = first + program % (8 * COLUMN_TILES) % together
        column_tile = program % (8 * COLUMN_TILES) // together
    return row_tile, column_tile


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    row,
    is_row,
    column,
    is_column,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Multiply rows `row` of x [rows, K] by rows `column` of weight [n, K]; return float32, not yet rounded.

    int8 weights are multiplied as they are, and the sum is multiplied by scale [n]. Then bias [n] is added.
    """
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(0, K, BLOCK_K):
        is_left = (k < K - start) | (K % BLOCK_K == 0)
        x = tl.load(x_at, mask=is_row[:, None] & is_left[None, :], other=0)
        weight = tl.load(weight_at, mask=is_column[None, :] & is_left[:, None], other=0)
        if WIDE_DOT:
            x = x.to(tl.float32)
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if weight_ptr.dtype.element_ty == tl.int8:
        total *= tl.load(scale_ptr + column, mask=is_column, other=0)[None, :]
    # Zero is added if there is no bias: where sums are rounded right after the loop, ptxas makes each product on Hopper
    # wait for the one before it.
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=is_column, other=0).to(tl.float32)[None, :]
    return total + bias


@triton.jit
def pairs_of(total):  # type: ignore[no-untyped-def]
    """Split [m, 2 n] into its even and its odd columns, each [m, n]; a thread holds both of a pair."""
    return tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))
