"""Tiles that were measured on a chip, in place of the ones that kernels choose by reasoning: data, in configs/<chip>.json.

Each entry is {"kernel", "shape", "constants", "num_warps", "num_stages", "us"}: for a kernel whose `shape_of` is that, the
constants that are tiles, how it is compiled, and the microseconds that it took. `make gpu-tune` writes them.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from inferc.codegen.triton.source import Source

FOLDER = Path(__file__).parent / "configs"
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
    shape = shape_of(source)
    for entry in _entries(arch):
        if entry["kernel"] == kernel and entry["shape"] == shape:
            constants = {**source.constants, **entry["constants"]}
            return dataclasses.replace(
                source, constants=constants, num_warps=entry["num_warps"], num_stages=entry["num_stages"]
            )
    return source


@lru_cache
def _entries(arch: str) -> tuple[dict[str, Any], ...]:
    path = FOLDER / f"{arch}.json"
    return tuple(json.loads(path.read_text())) if path.exists() else ()
