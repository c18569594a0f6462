"""The arena: the one block of memory that the values of a step lie in, as the compiler plans it and every runner reads it.

A value lies in a pool, `offset` bytes a row behind its begin, in rows of `row_bytes`. Pools follow one another, each sized for the most
rows that a step may have:

    [T: most tokens)  [S: most logits rows)  [B: most sequences)  [sample: logits rows at a time)  scratch …

So the address of a value depends on the maxima alone, which are multiples of ROW_ALIGNMENT. C++ states the same in
codegen/cpp/kernels/step.h and inferc_abi.h, which a test compares. Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

POOLS = ("T", "S", "B", "sample")
ROW_ALIGNMENT = 64  # the most rows of a pool are a multiple of it
SAMPLE_ROWS = 64  # most rows whose logits exist at a time, but where a runner says otherwise


def align_rows(count: int) -> int:
    """The least multiple of ROW_ALIGNMENT that is not less."""
    return -(-count // ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True)
class MostRows:
    """The most rows of each pool, that an arena was made for."""

    tokens: int
    rows: int
    seqs: int
    sample: int = SAMPLE_ROWS

    @staticmethod
    def of(tokens: int, rows: int, seqs: int, sample: int = SAMPLE_ROWS) -> MostRows:
        """For steps of at most so many tokens, logits rows and sequences."""
        return MostRows(align_rows(tokens), align_rows(rows), align_rows(seqs), sample)

    def of_pool(self, pool: str) -> int:
        return {"T": self.tokens, "S": self.rows, "B": self.seqs, "sample": self.sample}[pool]


@dataclass(frozen=True)
class Arena:
    """pools: bytes a row of each."""

    pools: Mapping[str, int]

    def num_bytes(self, most: MostRows) -> int:
        """Of all pools, without scratch."""
        return sum(size * most.of_pool(pool) for pool, size in self.pools.items())

    def address(self, pool: str, offset: int, most: MostRows) -> int:
        """Where in the arena a value begins that lies `offset` bytes a row behind its pool's begin."""
        before = POOLS[: POOLS.index(pool)]
        return sum(self.pools[each] * most.of_pool(each) for each in before) + offset * most.of_pool(pool)

    @property
    def formula(self) -> dict[str, int]:
        """The arena's bytes: `const + per_token * T + per_row * S + per_seq * B + per_thread * threads`."""
        return {
            "const": self.pools["sample"] * SAMPLE_ROWS,
            "per_token": self.pools["T"],
            "per_row": self.pools["S"],
            "per_seq": self.pools["B"],
            "per_thread": 0,
        }
