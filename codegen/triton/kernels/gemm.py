"""What the matrix products share: how they are cut into tiles, the order of their programs, and their loop over k.

Each element is summed in one accumulator, k ascending, without split-k: a row's bits depend neither on the other rows nor
on how many there are, as long as tiles are cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

ROW_BOUNDS = (16, 32, 64, 128, None)
"""Up to how many rows each variant of a product is for; the last is for any number."""

SHARED_BYTES = 96 << 10  # of a block: what chips of 100 KB have, and two blocks of a multiprocessor of Hopper


@dataclass(frozen=True)
class Tile:
    """What one program makes of a product, and how."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    few: bool  # all rows of a step are in one program

    @property
    def constants(self) -> dict[str, int | float]:
        """Those of a kernel."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "FEW": int(self.few), "WIDE_DOT": 0}

    @property
    def stack_bytes(self) -> int:
        """Of sums of 64 rows and more ptxas parks two a thread on Blackwell, behind the loop, though registers are left."""
        return 16 if self.block_m >= 64 else 0

    def grid(self, column_tiles: str, rows: str) -> tuple[str, str, str]:
        """Of a launch over the `rows` ("tokens", "rows") of a step."""
        return column_tiles if self.few else f"{column_tiles} * ceil_div(num_{rows}, BLOCK_M)", "1", "1"


def tile(n: int, k: int, dtype: str, int8: bool, up_to: int | None, columns: tuple[int, int] = (16, 128)) -> Tile:
    """How x [rows, k] @ weight [n, k].T is cut, for at most `up_to` rows, a power of two from 16 to 128, or any number.

    columns: the least and the most of a tile, powers of two.

    With few rows the weights' way from memory is all that counts. To keep an H100's memory busy each of its 132
    multiprocessors needs about 20 KB under way, better twice that: tiles are as wide as leaves one for each, and so many
    of them are buffered as SHARED_BYTES holds, mostly 32 to 64 KB of weights a block, of which one tile is in use. They
    are as long as lets there be four: of each row 128 to 512 bytes in one piece, and seldom a barrier. All programs read
    x, from an L2 that is only about twice as fast as the memory, so from 64 rows on tiles are about as wide as high, though
    that leaves half of the multiprocessors without one where n is 4096.

    For any number of rows the tensor cores count: the largest tiles of which two are on a multiprocessor. float32 is
    multiplied without tensor cores, and not meant to be fast.
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
    if block_m * block_n > 128 * 128:  # what registers hold of sums
        block_m, few = 64, few and block_m <= 64
    lengths = [each for each in (256, 128, 64, 32) if k % each == 0] or [64]
    least_buffers = 4 if block_m * block_n < 128 * 128 else 3
    fit = [each for each in lengths if _buffers(block_m, block_n, each, int8) >= least_buffers]
    block_k = fit[0] if fit else lengths[-1]
    # From 64 rows on Hopper's tensor cores read a tile where it is buffered, so that it is kept a stage longer.
    num_stages = min(12, _buffers(block_m, block_n, block_k, int8)) + (block_m < 64)
    return Tile(block_m, block_n, block_k, _num_warps(block_m, block_n, int8), num_stages, few)


def _num_warps(block_m: int, block_n: int, int8: bool) -> int:
    if (block_m, block_n) == (16, 16):  # two tiles of the tensor cores
        return 2
    if int8 and (block_m, block_n) == (32, 32):  # two warps each convert the same weights: more of them hide it
        return 8
    return 8 if block_m == 128 or block_m * block_n > 64 * 128 else 4


def _buffers(block_m: int, block_n: int, block_k: int, int8: bool) -> int:
    """How many tiles of x and the weight shared memory holds, beside one of int8 converted for the tensor cores."""
    weight = block_n * block_k
    converted = 2 * weight if int8 and block_m >= 64 else 0
    return (SHARED_BYTES - converted) // (2 * block_m * block_k + (weight if int8 else 2 * weight))


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(rows, COLUMN_TILES: tl.constexpr, BLOCK_M: tl.constexpr, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of rows and that of columns of this program.

    Eight tiles of rows go by a tile of the weight while it is in the L2, then they take the next.
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
    """Rows `row` of x [rows, K] times rows `column` of weight [n, K], in float32, not yet rounded.

    Weights of int8 are multiplied as they are, the sum by scale [n]. Then bias [n] is added.
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
    bias = 0.0  # added as well: where sums are rounded at once, ptxas has each product on Hopper wait for the last
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=is_column, other=0).to(tl.float32)[None, :]
    return total + bias


@triton.jit
def pairs_of(total):  # type: ignore[no-untyped-def]
    """[m, 2 n] as two [m, n]: the even columns and the odd ones, which a thread holds both of."""
    return tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))
