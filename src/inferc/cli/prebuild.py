"""The build of common kernels ahead of the first compile: `python -m inferc.cli.prebuild`.

It needs nothing but a compiler, so that it can run while packages are still being installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from inferc.errors import InfercError


def main(arguments: list[str] | None = None) -> int:
    """Build the common kernels; return the exit code."""
    from inferc.codegen.cpp.build import ISAS, PREBUILT_FOLDER, build_objects
    from inferc.codegen.cpp.prebuild import common_units

    parser = argparse.ArgumentParser(prog="python -m inferc.cli.prebuild", description=main.__doc__)
    parser.add_argument("--only", action="append", metavar="OF", help='those of a program, as "llama bfloat16"')
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at a time")
    parser.add_argument("--out", type=Path, default=PREBUILT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        units = common_units(options.only or ())
        count = build_objects(units, options.out, ISAS, options.jobs)
    except (InfercError, OSError) as error:
        print(f"no kernels are built ahead ({error}); compiles build them when they need them", file=sys.stderr)
        return error.exit_code if isinstance(error, InfercError) else 1
    print(f"{len(units)} kernels for {', '.join(ISAS)}: {count} objects built in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
