"""The environment variables that inferc reads: INFERC_DEBUG, INFERC_DUMP, INFERC_CACHE and INFERC_ISAS."""

import os
from pathlib import Path


def level() -> int:
    """INFERC_DEBUG: 1 pass table, 2 matches and kernels, 3 the IR after each change, 4 generated source; 0 when unset."""
    value = os.environ.get("INFERC_DEBUG", "0")
    return int(value) if value.isdigit() else 0


def dump_dir() -> Path | None:
    """INFERC_DUMP: the folder that gets the program after each pass."""
    value = os.environ.get("INFERC_DUMP")
    return Path(value) if value else None


def cache_dir() -> Path:
    """INFERC_CACHE: where compiled kernels are kept between compiles; `~/.cache/inferc` when unset."""
    return Path(os.environ.get("INFERC_CACHE") or Path.home() / ".cache" / "inferc")


def isas() -> tuple[str, ...]:
    """INFERC_ISAS: the instruction sets that a compile makes libraries for, with commas between; all when unset."""
    return tuple(name.strip() for name in os.environ.get("INFERC_ISAS", "").split(",") if name.strip())
