"""Which block of the KV pool holds what: free blocks, block tables, reference counts.

Knows block ids only; the bytes are the model runner's.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from inferc.runtime.step import I32, I64


class BlockPool:
    """The blocks of one KV group. Block 0 is reserved: padding is written there.

    A block is free when its ref_count is 0. Freed blocks go to the back of the queue and are taken from its front,
    so what was freed first is overwritten first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free: deque[int] = deque(range(1, num_blocks))
        self.ref_count = np.zeros(num_blocks, np.int32)

    def take(self, count: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(count)]
        self.ref_count[blocks] += 1
        return blocks

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block; those without any left become free, the last of a sequence first.

        A prefix is worth more than what follows it, so tails are overwritten before it.
        """
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free.append(block)


class KVCacheManager:
    """Block tables of the running sequences, by slot, over one pool per KV group.

    tables[g] [num_slots, max_blocks] i32, 0 beyond a sequence's blocks; num_held [num_slots] i64 blocks of a slot,
    the same number in every group.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, max_model_len: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        max_blocks = -(-max_model_len // block_size)
        self.pools = tuple(BlockPool(num_blocks) for _ in range(num_groups))
        self.tables: tuple[I32, ...] = tuple(np.zeros((num_slots, max_blocks), np.int32) for _ in range(num_groups))
        self.num_held: I64 = np.zeros(num_slots, np.int64)

    @property
    def num_free(self) -> int:
        """Blocks that every group can still give."""
        return min(len(pool.free) for pool in self.pools)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        total = self.num_blocks - 1
        return (total - self.num_free) / total if total else 1.0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give `slot` the blocks that hold `num_tokens`, in every group; False, and nothing changed, if too few are free."""
        held = int(self.num_held[slot])
        missing = self.blocks_for(num_tokens) - held
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        for pool, table in zip(self.pools, self.tables, strict=True):
            table[slot, held : held + missing] = pool.take(missing)
        self.num_held[slot] = held + missing
        return True

    def release(self, slot: int) -> None:
        """Free all blocks of `slot`."""
        held = int(self.num_held[slot])
        for pool, table in zip(self.pools, self.tables, strict=True):
            pool.drop(table[slot, :held].tolist())
            table[slot, :held] = 0
        self.num_held[slot] = 0

    def check_integrity(self) -> None:
        """Every block but 0 is either free, once, or referred to by as many tables as its ref_count says."""
        slots = np.arange(self.tables[0].shape[1]) < self.num_held[:, None]
        for pool, table in zip(self.pools, self.tables, strict=True):
            assert not table[~slots].any(), "a table holds blocks beyond its count"
            references = np.bincount(table[slots], minlength=pool.num_blocks)
            assert references[0] == 0, "block 0 is reserved and in a table"
            assert (references == pool.ref_count).all(), "ref counts do not add up"
            assert len(set(pool.free)) == len(pool.free), "a block is free twice"
            used = int((pool.ref_count > 0).sum())
            assert used + len(pool.free) == pool.num_blocks - 1, (
                f"{used} used and {len(pool.free)} free of {pool.num_blocks - 1}"
            )
            assert not pool.ref_count[list(pool.free)].any(), "a free block is referred to"


def root_hash(model_hash: str, kv_dtype: str, adapter: str = "", salt: str = "") -> bytes:
    """The hash before a sequence's first block: what must be equal for two sequences to share K and V at all.

    SHA-256 over length-prefixed fields, so that other processes and machines compute the same.
    """
    digest = hashlib.sha256()
    for part in (model_hash, kv_dtype, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block: of all tokens up to its end, through `previous`. Ids enter as little-endian u32."""
    return hashlib.sha256(previous + np.asarray(token_ids, "<u4").tobytes()).digest()
