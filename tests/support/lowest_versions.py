"""The lowest versions that pyproject.toml allows of what runs artifacts.

Usage: python lowest_versions.py > requirements.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = ("serve", "bench", "plot", "otel")
"""The extras beside the base that need neither torch nor a GPU."""


def lowest_python() -> str:
    return str(PROJECT["requires-python"]).removeprefix(">=")


def lowest() -> dict[str, str]:
    """The bound of each package, by its name. Every one of them must have one."""
    found = {}
    wanted = [*PROJECT["dependencies"], *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra])]
    for requirement in wanted:
        if requirement.startswith("inferc["):
            continue
        match = re.match(r"([\w-]+)>=([\d.]+)", requirement)
        assert match is not None, f"{requirement}: expected NAME>=VERSION"
        found[match[1]] = match[2]
    return found


def is_bound(version: str, bound: str) -> bool:
    """Return whether a version is the lowest that `>=bound` allows: 1.26.0 for 1.26, any patch for a shorter bound."""
    return version.split(".")[: bound.count(".") + 1] == bound.split(".")


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lowest().items()))
