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


def keeps_captures() -> bool:
    """Return whether captured programs are kept on disk: INFERC_CAPTURES is not 0.

    To turn it off is for those who change a model's code in memory, which no file tells.
    """
    return os.environ.get("INFERC_CAPTURES", "1") != "0"


PROGRESS = ("bar", "lines", "none")


def progress() -> str:
    """Return how INFERC_PROGRESS wants the progress of long commands shown: "bar", "lines" or "none"; "" when unset.

    Raises ConfigError for anything else.
    """
    value = os.environ.get("INFERC_PROGRESS", "")
    if value not in ("", *PROGRESS):
        raise ConfigError(f"INFERC_PROGRESS is {value!r}, expected one of {', '.join(PROGRESS)}")
    return value


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
