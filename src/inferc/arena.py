"""The arena: one block of memory for the values of a step, as the compiler plans it and every runner reads it.

A value lies in a pool, in rows of `row_bytes`, `offset` bytes per row after the pool's start. Pools follow one another,
each sized for the most rows that a step may have:

    [T: most tokens)  [S: most logits rows)  [B: most sequences)  [sample: logits rows at a time)  scratch …

So the address of a value depends on the maxima alone, which are multiples of ROW_ALIGNMENT. C++ states the same in
codegen/cpp/kernels/step.h and inferc_abi.h; a test compares the two. Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

Pool: TypeAlias = Literal["T", "S", "B", "sample"]
POOLS: tuple[Pool, ...] = get_args(Pool)
ROW_ALIGNMENT = 64  # the number of rows that a pool is sized for is a multiple of this
KERNEL_ALIGNMENT = 16  # bytes: that of every address that GPU kernels and cuBLASLt are given
ENGINE_ALIGNMENT = 256  # bytes: that of every address that TensorRT is given, and of what drivers allocate
LINE_BYTES = 64  # a cache line
SAMPLE_ROWS = 64  # the most rows whose logits exist at a time, unless a runner says otherwise


def round_up(count: int, to: int) -> int:
    """Round `count` up to a multiple of `to`."""
    return -(-count // to) * to


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask with a bit for each token."""
    return -(-vocab_size // 32)


def align_rows(count: int) -> int:
    """Round `count` up to a multiple of ROW_ALIGNMENT."""
    return round_up(count, ROW_ALIGNMENT)


Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]


class MemoryFormula(Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a step's arena in bytes, as a linear function of the most that a step may hold."""

    const: Bytes
    per_token: Bytes
    per_row: Bytes
    per_seq: Bytes
    per_thread: Bytes

    def arena_bytes(self, num_tokens: int, num_rows: int, num_seqs: int, num_threads: int) -> int:
        """Return the bytes for these maxima; all but the threads are rounded up to a multiple of 64."""
        rows = (
            self.per_token * align_rows(num_tokens)
            + self.per_row * align_rows(num_rows)
            + self.per_seq * align_rows(num_seqs)
        )
        return self.const + rows + self.per_thread * num_threads

    def reserved_bytes(self, num_tokens: int, num_seqs: int, num_threads: int) -> int:
        """Return the bytes that a runner reserves: scoring needs a row per token. Untouched pages take no memory."""
        return self.arena_bytes(num_tokens, num_tokens, num_seqs, num_threads)


@dataclass(frozen=True)
class MostRows:
    """The largest number of rows of each pool that an arena is made for."""

    tokens: int
    rows: int
    seqs: int
    sample: int = SAMPLE_ROWS

    @staticmethod
    def of(tokens: int, rows: int, seqs: int, sample: int = SAMPLE_ROWS) -> MostRows:
        """Return the rows for steps of at most so many tokens, logits rows and sequences, rounded up by align_rows."""
        return MostRows(align_rows(tokens), align_rows(rows), align_rows(seqs), sample)

    def of_pool(self, pool: Pool) -> int:
        return {"T": self.tokens, "S": self.rows, "B": self.seqs, "sample": self.sample}[pool]


@dataclass(frozen=True)
class Arena:
    """The pools of an arena, with the bytes per row of each."""

    pools: Mapping[Pool, int]

    def num_bytes(self, most: MostRows) -> int:
        """Return the bytes of all pools, without scratch."""
        return sum(size * most.of_pool(pool) for pool, size in self.pools.items())

    def address(self, pool: Pool, offset: int, most: MostRows) -> int:
        """Return the offset in the arena at which a value begins that has `offset` bytes per row in its pool."""
        before = POOLS[: POOLS.index(pool)]
        return sum(self.pools[each] * most.of_pool(each) for each in before) + offset * most.of_pool(pool)

    @property
    def formula(self) -> MemoryFormula:
        """The arena's size in bytes, without scratch."""
        return MemoryFormula(
            const=self.pools["sample"] * SAMPLE_ROWS,
            per_token=self.pools["T"],
            per_row=self.pools["S"],
            per_seq=self.pools["B"],
            per_thread=0,
        )


class Place(Struct, frozen=True):
    """The place of a value's rows in a pool, [offset, offset + row_bytes), counted in bytes per row.

    row_bytes is the distance from one row to the next and includes the row's padding.
    """

    pool: Pool
    row_bytes: Bytes
    offset: Bytes


class Pools(Struct, frozen=True):
    T: Bytes
    S: Bytes
    B: Bytes
    sample: Bytes


class MemoryPlan(Struct, frozen=True):
    """The places of all values of a step, and the bytes per row of each pool, as program.json has them.

    values: places by the names of nodes; a part of a tuple is listed under its getitem's name.
    """

    values: dict[str, Place]
    pools: Pools
    formula: MemoryFormula

    @staticmethod
    def of(values: dict[str, Place], pools: Mapping[Pool, int]) -> MemoryPlan:
        own = Pools(T=pools["T"], S=pools["S"], B=pools["B"], sample=pools["sample"])
        return MemoryPlan(values, own, Arena(pools).formula)

    @property
    def arena(self) -> Arena:
        pools = self.pools
        return Arena({"T": pools.T, "S": pools.S, "B": pools.B, "sample": pools.sample})

    def arena_bytes(self, num_tokens: int, num_rows: int, num_seqs: int) -> int:
        """Return the arena's size in bytes for steps of at most so many tokens, logits rows and sequences."""
        return self.arena.num_bytes(MostRows.of(num_tokens, num_rows, num_seqs))

    def address(self, name: str, num_tokens: int, num_rows: int, num_seqs: int) -> int:
        """Return the address of a value in the arena, in bytes."""
        place = self.values[name]
        return self.arena.address(place.pool, place.offset, MostRows.of(num_tokens, num_rows, num_seqs))
