"""The C++ translation units of a program, the headers that they include, and the units of single kernels.

It imports nothing that must be installed, so that kernels can be built where only a compiler is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferc.arena import MemoryFormula
    from inferc.manifest_types import LibraryPart

HEADERS = (
    "inferc_abi.h",
    "simd.h",
    "simd_x86.h",
    "simd_arm.h",
    "dot.h",
    "amx.h",
    "team.h",
    "gemm.h",
    "amx_gemm.h",
    "rows.h",
    "lora.h",
    "kv.h",
    "key_tile.h",
    "attention.h",
    "moe.h",
    "quantize.h",
    "int4.h",
    "odds.h",
    "narrow.h",
    "sample.h",
    "step.h",
    "collectives.h",
    "exchange.h",
    "kernels.h",
    "peak.h",
    "entry.h",
)
COMMON_HEADER = "kernels.h"


@dataclass(frozen=True)
class CppUnit:
    """Generated source, the headers that it includes, and what is added to program.json for it."""

    source: str
    parts: tuple[str, ...]  # the other units: one for each kernel that is called, and one with the entry points
    headers: tuple[str, ...]  # file names in codegen/cpp/kernels; all units include COMMON_HEADER first
    arena: MemoryFormula
    part: LibraryPart
    own_headers: Mapping[str, str] = field(default_factory=dict)  # headers of a user's kernels: file name to text
    leaves_templates: bool = True  # every template that `source` calls is instantiated in `parts`

    @property
    def whole(self) -> str:
        """The source and all parts as one unit, which g++ compiles as well."""
        return "\n".join((self.source, *self.parts))


def kernel_parts(kernels: Collection[tuple[str, bool]], own_headers: Sequence[str]) -> tuple[str, ...]:
    """Return a unit for each kernel that is a template (the others are inline), and one for the entry points.

    kernels: pairs of the kernel's text and whether it is a user's kernel, defined in one of `own_headers`.
    """
    parts = []
    for kernel, own in sorted(kernels):
        if "<" not in kernel:
            continue
        includes = "".join(f'#include "{name}"\n' for name in (COMMON_HEADER, *(own_headers if own else ())))
        name = "use_" + re.sub(r"\W+", "_", kernel).strip("_")
        parts.append(f"{includes}\nnamespace inferc {{\n[[gnu::used]] static const auto {name} = &{kernel};\n}}\n")
    return (*parts, f'#include "{COMMON_HEADER}"\n#include "entry.h"\n')
