"""The share of a multiprocessor that a kernel can keep busy, from what one of its blocks needs.

Source: CUDA C++ Programming Guide, table of technical specifications per compute capability.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferc.manifest_types import LaunchRecord

REGISTERS = 64 << 10  # registers of a multiprocessor
REGISTER_UNIT = 256  # a warp gets registers in multiples of this
RESERVED_SHARED = 1 << 10  # bytes of shared memory that the system reserves for each block


@dataclass(frozen=True)
class Multiprocessor:
    """The limits that the blocks on a multiprocessor share."""

    max_warps: int
    max_blocks: int
    shared_bytes: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 << 10),
    "sm_86": Multiprocessor(48, 16, 100 << 10),
    "sm_89": Multiprocessor(48, 24, 100 << 10),
    "sm_90": Multiprocessor(64, 32, 228 << 10),
    "sm_100": Multiprocessor(64, 32, 228 << 10),
    "sm_120": Multiprocessor(48, 24, 100 << 10),
}


# The number of programs of decode attention on each chip. All of them must run at once: it is the number of
# multiprocessors of the chip's largest GPU, times as many programs as surely fit on one.
PROGRAMS = {
    "sm_80": 2 * 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90": 2 * 132,
    "sm_100": 2 * 148,
    "sm_120": 188,
}


def max_shared_bytes(arch: str) -> int:
    """Return the most shared memory that a block can have, in bytes."""
    return MULTIPROCESSORS[arch].shared_bytes - RESERVED_SHARED


def occupancy(record: LaunchRecord) -> float:
    """Return the share of a multiprocessor's warps that blocks of the kernel fill."""
    of = MULTIPROCESSORS[record.arch]
    registers_of_warp = -(-record.resources["registers"] * 32 // REGISTER_UNIT) * REGISTER_UNIT
    shared = record.block_shared_bytes + RESERVED_SHARED
    blocks = min(
        of.max_blocks,
        of.max_warps // record.num_warps,
        REGISTERS // registers_of_warp // record.num_warps,
        of.shared_bytes // shared,
    )
    return blocks * record.num_warps / of.max_warps
