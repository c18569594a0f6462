"""The code that attention kernels share: which keys a query attends to, and the online softmax over tiles of keys.

A program takes the query heads of one kv head, for some new tokens of one sequence, as the rows of its products. It
goes through the keys in tiles at absolute positions. Sources: Dao 2023, arXiv:2307.08691; Kwon et al. 2023,
arXiv:2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS
from inferc.kv_groups import SCALE_BYTES

MASKS = ("causal", "sliding", "chunked")
LOG2_E = 1.4426950408889634
SEQS = 256  # sequences that a search looks at together


@triton.jit  # type: ignore[untyped-decorator]
def first_key(position, MASK: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key that the query at `position` attends to; it attends to all from there to itself."""
    first = position * 0
    if MASK == 1:
        first = tl.maximum(position - WINDOW + 1, 0)
    if MASK == 2:
        first = position // WINDOW * WINDOW
    return first


@triton.jit  # type: ignore[untyped-decorator]
def last_up_to(starts_ptr, count, value, QUERIES: tl.constexpr, SEQS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the last of `count` sequences that starts at `value` or before.

    If QUERIES is not 0, it is the number of tokens of a program, and `value` is a program. A sequence then starts at
    program starts[seq] // QUERIES + seq, which leaves enough programs for its tokens.
    """
    found = -1
    for first in range(0, count, SEQS):
        seq = first + tl.arange(0, SEQS)
        start = tl.load(starts_ptr + seq, mask=seq < count, other=0)
        if QUERIES != 0:
            start = start // QUERIES + seq
        found += tl.sum(((seq < count) & (start <= value)).to(tl.int32), 0)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def widened(x, dtype: tl.constexpr, IN_ORDER: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert int8 values to `dtype`.

    With PTX, NVIDIA's instructions convert to bfloat16, four values at a time. The bfloat16 0x4300 is 128, and the last
    bit of its mantissa is worth 1: the low seven bits of x, put there, make 128 + low. Then 128 is subtracted. The sign
    bit of x is worth -128: put into the same byte of the subtrahend, it makes 256 of the 128. With IN_ORDER, rows are
    converted in the order in which they were loaded, and the results are reordered. That is for an operand which would
    otherwise be put together from single bytes.
    """
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, sign, first, second, less;
            mov.b32 less, 0xbf80bf80;
            and.b32 low, $2, 0x7f7f7f7f;
            and.b32 sign, $2, 0x80808080;
            prmt.b32 first, low, 0x43434343, 0x4140;
            prmt.b32 second, sign, 0x43434343, 0x4140;
            fma.rn.bf16x2 $0, second, less, first;
            prmt.b32 first, low, 0x43434343, 0x4342;
            prmt.b32 second, sign, 0x43434343, 0x4342;
            fma.rn.bf16x2 $1, second, less, first;
            }
            """,
            "=r,=r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=IN_ORDER == 0,
            pack=4,
        )
    else:
        return x.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    q,
    m_i,
    l_i,
    acc,
    head_ptr,
    table_ptr,
    slope,
    position,
    lowest,
    highest,
    start,
    end,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    INT8: tl.constexpr,
    IN_ORDER: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LOG2_E: tl.constexpr,
    PTX: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Add the keys [start, end) to an online softmax, and return its new state: m_i, l_i and acc.

    m_i [rows] is the largest score times log2(e), l_i [rows] the sum of the exponentials, and acc [rows, dim] the
    sum of the values weighted by them.

    q is [rows, dim]. Row r is at position[r], the first row at `lowest` and the last one at `highest`. head_ptr is the
    layer's and kv head's part of block 0. table_ptr is the sequence's block table. With ALIBI, slope [rows] is what a
    row's score gains for each position that the key lies further on.
    """
    UNITS: tl.constexpr = LOG2_E if SOFTCAP != 0.0 or ALIBI else SCALE * LOG2_E  # scores times this are exponents of 2
    d = tl.arange(0, q.shape[1])
    from_key = first_key(position, MASK, WINDOW)
    read_from = first_key(lowest, MASK, WINDOW)
    whole_from, whole_end = first_key(highest, MASK, WINDOW), tl.minimum(lowest + 1, end)
    key = start + tl.arange(0, TILE)
    # Keys that no query attends to are not read: their block may have been freed, and may hold anything.
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=(key >= read_from) & (key < end), other=0)
    for tile in tl.range(start, end, TILE, num_stages=STAGES):
        key = tile + tl.arange(0, TILE)
        is_read = (key >= read_from) & (key < end)
        at = head_ptr + block.to(tl.int64) * BLOCK_STRIDE
        row = key % BLOCK_SIZE
        # Block table entries are loaded one tile ahead: copies of K and V that had to wait for them would not overlap
        # with the products.
        after = key + TILE
        block = tl.load(table_ptr + after // BLOCK_SIZE, mask=(after >= read_from) & (after < end), other=0)
        there = is_read[:, None] & (d < DIM)[None, :]
        k = tl.load((at + row * DIM)[:, None] + d[None, :], mask=there, other=0)
        if INT8:
            k = widened(k, q.dtype, 0, PTX)
            scales = (at + BLOCK_SIZE * DIM).to(tl.pointer_type(tl.float32)) + row
            k_scale = tl.load(scales, mask=is_read, other=0.0)
        if WIDE_DOT:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if INT8:
            scores *= k_scale[None, :]
        if SOFTCAP != 0.0:
            # tanh from one exponential: where that overflows to infinity, tanh is 1, as it should be.
            scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (SCALE * 2.0 * LOG2_E / SOFTCAP)) + 1.0))
        if ALIBI:
            scores = scores * SCALE + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if (tile < whole_from) | (tile + TILE > whole_end):  # some query does not attend to some key
            seen = (key[None, :] >= from_key[:, None]) & (key[None, :] <= position[:, None])
            scores = tl.where(seen & (key < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(m_i, tl.max(scores, 1) * UNITS)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(m_i - base)
        p = tl.exp2(scores * UNITS - base[:, None])
        l_i = l_i * factor + tl.sum(p, 1)
        v = tl.load((at + PART + row * DIM)[:, None] + d[None, :], mask=there, other=0)
        if INT8:
            v = widened(v, q.dtype, IN_ORDER, PTX)
            scales = (at + PART + BLOCK_SIZE * DIM).to(tl.pointer_type(tl.float32)) + row
            p *= tl.load(scales, mask=is_read, other=0.0)[None, :]
        p = p.to(v.dtype)
        if WIDE_DOT:
            p, v = p.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(p, v, acc * factor[:, None], input_precision="ieee")
        m_i = higher
    return m_i, l_i, acc


@triton.jit
def merge(m_i, l_i, acc, other_m, other_l, other_acc):  # type: ignore[no-untyped-def]
    """Merge two softmaxes over different keys into one.

    The result is rounded in the same way wherever the function is compiled.
    """
    higher = tl.maximum(m_i, other_m)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    factor, other_factor = tl.exp2(m_i - base), tl.exp2(other_m - base)
    l_i = tl.fma(l_i, factor, other_l * other_factor)
    acc = tl.fma(acc, tl.broadcast_to(factor[:, None], acc.shape), other_acc * other_factor[:, None])
    return higher, l_i, acc


@dataclass(frozen=True)
class AttentionShape:
    """The sizes, dtypes and masks that an attention kernel is compiled for.

    It does not say how the kernel goes through the keys. `dtype` is that of q and out. Their rows have heads * dim
    elements, and are `strides` elements apart. `layers` and `block_size` describe the cache's blocks. `mask` and
    `window` are those of `inferc.paged_attention`.
    """

    dtype: str
    heads: int
    kv_heads: int
    dim: int
    strides: tuple[int, int]
    layers: int
    block_size: int
    scale: float
    softcap: float
    mask: str
    window: int
    has_sinks: bool
    int8_kv: bool = False
    has_alibi: bool = False

    @property
    def group(self) -> int:
        """The number of query heads per kv head."""
        return self.heads // self.kv_heads

    def signature(self, scratch: dict[str, str]) -> dict[str, str]:
        """Return a kernel's arguments; `scratch` maps the name of each further pointer to its dtype."""
        return {
            "q_ptr": POINTERS[self.dtype],
            "cache_ptr": POINTERS["int8" if self.int8_kv else self.dtype],
            **dict.fromkeys(("block_table_ptr", "query_start_ptr", "seq_lens_ptr"), POINTERS["int32"]),
            "sinks_ptr": POINTERS[self.dtype],
            "out_ptr": POINTERS[self.dtype],
            **{name: POINTERS[kind] for name, kind in scratch.items()},
            "counts_ptr": POINTERS["int32"],
            "max_blocks_ptr": POINTERS["int32"],
            **({"alibi_ptr": POINTERS["float32"]} if self.has_alibi else {}),
        }

    def constants(self) -> dict[str, int | float]:
        """Return the constants that all attention kernels have.

        PART is the distance from a head's K to its V, in elements of the pool.
        """
        assert self.scale > 0, self.scale  # so that the largest product of q and k is the largest score
        part = self.block_size * (self.dim + (SCALE_BYTES if self.int8_kv else 0))
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "DIM": self.dim,
            "Q_STRIDE": self.strides[0],
            "OUT_STRIDE": self.strides[1],
            "PART": part,
            "BLOCK_STRIDE": self.layers * self.kv_heads * 2 * part,
            "BLOCK_SIZE": self.block_size,
            "SCALE": self.scale,
            "SOFTCAP": self.softcap,
            "MASK": MASKS.index(self.mask),
            "WINDOW": self.window,
            "HAS_SINKS": int(self.has_sinks),
            **({"ALIBI": 1} if self.has_alibi else {}),
            "INT8": int(self.int8_kv),
            "BLOCK_D": max(16, triton.next_power_of_2(self.dim)),
            "SEQS": SEQS,
            "LOG2_E": LOG2_E,
            "PTX": 1,
            "WIDE_DOT": 0,
        }


def decode_rows(group: int) -> int:
    """Return the number of rows of decode's products: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(group)))


def query_limit(group: int) -> int:
    """Return the most new tokens of a sequence that decode handles; prefill handles longer ones."""
    return decode_rows(group) // group


def stack_bytes(dtype: str, dim: int, int8_kv: bool) -> int:
    """Return how many bytes of a thread's registers ptxas may spill.

    It may spill a few values outside of the loops. With float32 queries and large heads in int8, which only tests use,
    it may spill any.
    """
    return 4096 if dtype == "float32" and int8_kv and dim > 64 else 32
