"""How much of a chip a kernel can keep busy, by what one of its blocks takes.

Source: CUDA C++ Programming Guide, table of technical specifications per compute capability.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferc.codegen.triton.aot.launch import LaunchRecord

REGISTERS = 64 << 10  # of a multiprocessor
REGISTER_UNIT = 256  # given to a warp at once
RESERVED_SHARED = 1 << 10  # of each block, by the system


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on it share."""

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


# Of decode attention, which are all to be there at once: of the chip's largest GPU, as many a multiprocessor as surely fit.
PROGRAMS = {
    "sm_80": 2 * 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90": 2 * 132,
    "sm_100": 2 * 148,
    "sm_120": 188,
}


def max_shared_bytes(arch: str) -> int:
    """Of a block."""
    return MULTIPROCESSORS[arch].shared_bytes - RESERVED_SHARED


def occupancy(record: LaunchRecord) -> float:
    """The share of a multiprocessor's warps that blocks of the kernel fill."""
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
