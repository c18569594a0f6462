"""Find the tiles of the products of a model on the GPU that is here, and write them where the compiler looks for them.

    python benchmarks/gpu_tune.py [SHAPE …] [--int8]        shapes of make_model.py; llama-3.1-8b and llama-3.2-1b if none is named

Every product of the shape, for each number of rows that has a kernel of its own, with every tile that the chip has room for; each launch reads
weights that no cache holds. The fastest goes into codegen/triton/configs/CHIP.json if it is faster than the compiler's own choice by
more than noise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from inferc.codegen.triton.source import Source
from inferc.codegen.triton.tuning import TILES

SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
KERNELS = ("linear", "linear_silu_mul", "qkv_rope_kv_write")
WORTH = 0.97  # of the time of the compiler's own choice
REPEATS = 20
COLD_BYTES = 256 << 20  # more than any L2
SIZES: dict[str, tuple[int, ...]] = {"BLOCK_N": (16, 32, 64, 128, 256), "BLOCK_K": (32, 64, 128, 256, 512)}
WARPS, STAGES = (2, 4, 8), (2, 3, 4, 5, 6)
MAX_SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
SMALL_SHARED = 99 << 10


def candidates(source: Source) -> Iterator[Source]:
    """The source with every other tile."""
    names = [name for name in TILES if name in source.constants]
    for sizes in itertools.product(*(SIZES[name] for name in names)):
        for warps, stages in itertools.product(WARPS, STAGES):
            constants = {**source.constants, **dict(zip(names, sizes, strict=True))}
            yield dataclasses.replace(source, constants=constants, num_warps=warps, num_stages=stages)
