"""The environment variables that inferc reads; their names begin with `INFERC_`."""

import os
import shlex
from pathlib import Path

from inferc.errors import ConfigError


def level() -> int:
    """Return the debug level of INFERC_DEBUG; 0 when unset.

    1 shows the pass table, 2 matches and kernels, 3 the IR after each change, 4 generated source.
    """
    value = os.environ.get("INFERC_DEBUG", "0")
    return int(value) if value.isdigit() else 0


def dump_dir() -> Path | None:
    """Return the folder of INFERC_DUMP, which gets the program after each pass; None when unset."""
    value = os.environ.get("INFERC_DUMP")
    return Path(value) if value else None


def cache_dir() -> Path:
    """Return the folder of INFERC_CACHE, which keeps compiled kernels; `~/.cache/inferc` when unset."""
    return Path(os.environ.get("INFERC_CACHE") or Path.home() / ".cache" / "inferc")


def isas() -> tuple[str, ...]:
    """Return the instruction sets of INFERC_ISAS, separated by commas there, for which a compile makes libraries.

    Empty when unset, which means all.
    """
    return tuple(name.strip() for name in os.environ.get("INFERC_ISAS", "").split(",") if name.strip())


def cxx_flags() -> tuple[str, ...]:
    """Return the compiler flags of INFERC_CXXFLAGS, as a shell would split them; they come after inferc's own.

    Empty when unset. Raises ConfigError if a quotation mark is not closed.
    """
    value = os.environ.get("INFERC_CXXFLAGS", "")
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise ConfigError(f"INFERC_CXXFLAGS is {value!r}: {error}; close it") from None
