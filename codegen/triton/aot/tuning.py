"""The tiles and libraries that were measured to be best on a chip, which replace the choices that kernels make.

They are data in configs/<chip>.json, which `make gpu-tune` writes. Each entry is for a "kernel" whose `shape_of` equals
its "shape", and has one or both of these:

- A tile: "constants", "num_warps", "num_stages", and the microseconds that it took, "us".
- A faster library: "library" with {"name", "from_rows", "us"}. Its "us" has, by number of rows, the microseconds that
  the kernel took and those that the library took.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from inferc.codegen.triton.aot.source import Source
from inferc.manifest_types import RecordLibrary

FOLDER = Path(__file__).parents[1] / "configs"
# Constants that change how a result is computed, but neither the result nor what the caller passes.
TILES = (
    "BLOCK_N",
    "BLOCK_K",
)


def shape_of(source: Source) -> dict[str, Any]:
    """Return what a tile is chosen by: the kernel's types and constants, without tiles and strides."""
    types = list(dict.fromkeys(kind for kind in source.signature.values() if kind != "*i32"))
    kept = {
        name: value for name, value in source.constants.items() if name not in TILES and not name.endswith("STRIDE")
    }
    return {"types": types, **kept}


def tuned(kernel: str, source: Source, arch: str) -> Source:
    """Return the source with the tile that was measured on this chip, if one was."""
    entry = _entry(kernel, source, arch)
    if "constants" not in entry:
        return source
    constants = {**source.constants, **entry["constants"]}
    return dataclasses.replace(
        source, constants=constants, num_warps=entry["num_warps"], num_stages=entry["num_stages"]
    )


def library_choice(kernel: str, source: Source, arch: str) -> RecordLibrary | None:
    """Return the library that was measured to be faster on this chip and from how many rows on, or None."""
    measured = _entry(kernel, source, arch).get("library")
    if measured is None or source.product is None:
        return None
    return RecordLibrary(measured["name"], measured["from_rows"], source.product)


def _entry(kernel: str, source: Source, arch: str) -> dict[str, Any]:
    """Return the tuning entry of a kernel, or an empty one."""
    shape = shape_of(source)
    of_kernel = (entry for entry in _entries(arch) if entry["kernel"] == kernel and entry["shape"] == shape)
    return next(of_kernel, {})


@lru_cache
def _entries(arch: str) -> tuple[dict[str, Any], ...]:
    path = FOLDER / f"{arch}.json"
    return tuple(json.loads(path.read_text())) if path.exists() else ()
