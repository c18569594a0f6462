"""The facts that every stored measurement carries: date, commit, machine, versions and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferc.cost.machine import cpu_model
from inferc.system.resources import available_cores

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "numpy", "triton")
CHANGES = ("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")  # changes of stored results do not count


def circumstances() -> dict[str, Any]:
    """Return the facts of this process: date (UTC), commit, CPU, cores, versions and command.

    The commit ends in "+changes" if the tree is not clean.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": available_cores(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES if find_spec(name)},
        },
        "command": shlex.join(["python", *_without_root(sys.argv)]),
    }


def commit() -> str:
    """Return the short hash of the checked-out commit; empty outside a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], check=True, capture_output=True, text=True, cwd=ROOT)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git(*CHANGES) else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def report(result: dict[str, Any], out: Path | None) -> None:
    """Print `result` as a line of JSON, and save it to the file `out` if one is given."""
    print(json.dumps(result))
    if out is not None:
        save(result, out)


def save(result: dict[str, Any], out: Path) -> None:
    """Write `result`, with the facts of this process, to the JSON file `out`."""
    partial = out.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({**circumstances(), **result}, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


def _without_root(words: list[str]) -> list[str]:
    return [str(Path(word).relative_to(ROOT)) if word.startswith(f"{ROOT}/") else word for word in words]
