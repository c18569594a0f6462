"""A compile in a process of its own: `python -m inferc.cli.compile_process MODEL OUT TARGET`.

Progress goes to standard error. An error goes to standard output as JSON, for the process that started this one: its
class of inferc.errors and its message.
"""

from __future__ import annotations

import json
import sys

from inferc.cli.progress import progress
from inferc.config import CompileConfig
from inferc.errors import ConfigError, InfercError
from inferc.system.own_process import exit_uncollected, own_imports


def main(model: str, out: str, target: str) -> int:
    """Compile `model` for `target` into `out` with the other options' defaults; return the exit code."""
    try:
        with progress("load torch") as report:
            try:
                with own_imports():
                    from inferc.compiler.build import compile
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"{model} is a model, which must be compiled first, and {error.name} is not installed:"
                    f" pip install 'inferc[compile]', or give an artifact that was compiled elsewhere"
                ) from None
            compile(model, out, CompileConfig(target=target), progress=report)
    except InfercError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    exit_uncollected()
    sys.exit(main(*sys.argv[1:]))
