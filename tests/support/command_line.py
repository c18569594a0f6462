"""The `inferc` command in this process: a process of its own takes a second to import what this one has.

What only a process shows (imports, streams, signals) is tried with `serving.INFERC`, the command as users start it.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path

from typer.testing import CliRunner

from inferc.cli.main import app


def run_inferc(
    *arguments: str | Path,
    stdin: str | bytes | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; what it logs is on its standard error, as in a process of its own.

    env: variables beside those of this process.
    """
    command = [str(argument) for argument in arguments]
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    try:
        with contextlib.chdir(cwd or Path.cwd()):
            result = CliRunner().invoke(app, command, input=stdin, env=env)
    finally:
        root.handlers = before
        root.setLevel(level)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)
