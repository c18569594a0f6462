"""What was measured on a chip, in place of what kernels choose by reasoning: data, in configs/<chip>.json.

Each entry is of a "kernel" whose `shape_of` is its "shape", and has one of two things or both. A tile: "constants",
"num_warps", "num_stages", and the microseconds that it took, "us". A library that is faster: "library", {"name",
"from_rows", "us"}, where "us" has what the kernel took and what the library did, by number of rows. `make gpu-tune`
writes them.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from inferc.codegen.triton.aot.launch import LibraryChoice
from inferc.codegen.triton.aot.source import Source

FOLDER = Path(__file__).parents[1] / "configs"
TILES = (
    "BLOCK_N",
    "BLOCK_K",
)  # constants that change how a result is computed, and neither it nor what the caller gives


def shape_of(source: Source) -> dict[str, Any]:
    """What a tile is chosen by: the kernel's types and constants, without tiles and strides."""
    types = list(dict.fromkeys(kind for kind in source.signature.values() if kind != "*i32"))
    kept = {
        name: value for name, value in source.constants.items() if name not in TILES and not name.endswith("STRIDE")
    }
    return {"types": types, **kept}


def tuned(kernel: str, source: Source, arch: str) -> Source:
    """The source with the tile that was measured on this chip, if one was."""
    entry = _entry(kernel, source, arch)
    if "constants" not in entry:
        return source
    constants = {**source.constants, **entry["constants"]}
    return dataclasses.replace(
        source, constants=constants, num_warps=entry["num_warps"], num_stages=entry["num_stages"]
    )


def library_choice(kernel: str, source: Source, arch: str) -> LibraryChoice | None:
    """From how many rows on which library is faster on this chip, if one was measured to be."""
    measured = _entry(kernel, source, arch).get("library")
    if measured is None or source.product is None:
        return None
    return LibraryChoice(measured["name"], measured["from_rows"], source.product)


def _entry(kernel: str, source: Source, arch: str) -> dict[str, Any]:
    """What was measured of a kernel."""
    shape = shape_of(source)
    of_kernel = (entry for entry in _entries(arch) if entry["kernel"] == kernel and entry["shape"] == shape)
    return next(of_kernel, {})


@lru_cache
def _entries(arch: str) -> tuple[dict[str, Any], ...]:
    path = FOLDER / f"{arch}.json"
    return tuple(json.loads(path.read_text())) if path.exists() else ()
