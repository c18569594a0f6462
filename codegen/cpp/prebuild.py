"""The list of common kernels, which are built ahead of the first compile: those of the usual dtypes and schemes.

They are compiled into a folder of the package, where every compile finds them, whatever the model and whatever its g++.
`make install` builds those of a bfloat16 model, and a wheel holds all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from inferc.codegen.cpp.build import Unit
from inferc.codegen.cpp.unit import kernel_parts
from inferc.errors import ConfigError

COMMON = Path(__file__).with_name("common_kernels.json")


def common_units(only: Sequence[str] = ()) -> list[Unit]:
    """Return the units of common kernels, and that of the entry points.

    only: the programs whose kernels are wanted, without those of programs before them in the list; all if empty.
    Raises ConfigError for a program that the list does not have.
    """
    rows = json.loads(COMMON.read_text())
    programs = dict.fromkeys(row["of"] for row in rows)
    if unknown := [each for each in only if each not in programs]:
        raise ConfigError(f"--only {unknown[0]}: expected one of {', '.join(programs)}")
    kernels = [(row["kernel"], False) for row in rows if not only or row["of"] in only]
    return [Unit(part) for part in kernel_parts(kernels, ())]
