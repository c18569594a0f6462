"""What a stored measurement says of itself: when, of which commit, where, with what, and by which command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferc.config import available_cores
from inferc.cost.machine import cpu_model

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "numpy", "triton")
CHANGES = ("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")  # but what was measured before


def circumstances() -> dict[str, Any]:
    """Of this process: date (UTC), commit ("+changes" where the tree is not clean), CPU, cores, versions, command."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
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
    """The checked-out commit, short; empty outside a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], check=True, capture_output=True, text=True, cwd=ROOT)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git(*CHANGES) else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def report(result: dict[str, Any], out: Path | None) -> None:
    """Print `result` as a line of JSON, and save it to the file `out`, where one is given."""
    print(json.dumps(result))
    if out is not None:
        save(result, out)


def save(result: dict[str, Any], out: Path) -> None:
    """Write `result` with its circumstances to the JSON file `out`."""
    partial = out.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({**circumstances(), **result}, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


def _without_root(words: list[str]) -> list[str]:
    return [str(Path(word).relative_to(ROOT)) if word.startswith(f"{ROOT}/") else word for word in words]
