"""Compile the cases of all kernels for AMD's MI300.

Prints {kernel: {case: {"code", "shared", "spilled"}}} as JSON: bytes of machine code and of shared memory, and vector
registers that are kept in memory.

A process of its own: what LLVM cannot compile, such as NVIDIA's assembly, ends it.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton
from all_cases import KERNELS
from sampling_cases import kernels_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inferc.codegen.triton.aot.source import Source

TARGET = GPUTarget("hip", "gfx942", 64)
STAGES = 2  # the chip's copies go through registers: more are not under way, and its shared memory holds no more
VOCAB = 50257


def portable(source: Source) -> Source:
    """Return the source without what only NVIDIA's chips have."""
    changed = {name: value for name, value in (("PTX", 0), ("STAGES", STAGES)) if name in source.constants}
    return replace(source, constants={**source.constants, **changed}, num_stages=min(source.num_stages, STAGES))


def compiled(source: Source) -> dict[str, int]:
    signature = {**source.signature, **dict.fromkeys(source.all_constants, "constexpr")}
    order = list(source.signature)
    attributes = {(order.index(argument),): [["tt.divisibility", 16]] for argument in source.aligned}
    of = ASTSource(source.function, signature, source.all_constants, attributes)
    options: dict[str, Any] = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    made = triton.compile(of, target=TARGET, options=options)
    (spilled,) = re.findall(r"\.vgpr_spill_count: +(\d+)", made.asm["amdgcn"])
    return {"code": len(made.asm["hsaco"]), "shared": made.metadata.shared, "spilled": int(spilled)}


def sources() -> Iterator[tuple[str, str, Source]]:
    """(kernel, case, its source)."""
    for kernel, made in KERNELS.items():
        yield from ((kernel, case.name, case.source) for case in made())
    yield from ((name, f"vocabulary of {VOCAB}", source) for name, source in kernels_of(VOCAB).items())


if __name__ == "__main__":
    found: dict[str, dict[str, dict[str, int]]] = {}
    for kernel, case, source in sources():
        found.setdefault(kernel, {})[case] = compiled(portable(source))
    json.dump(found, sys.stdout)
