"""Make the peers' environments, one venv each; `make peers` runs this file.

    python benchmarks/peers/environments.py [NAME ...]

All versions are in locks/NAME.txt, so pip resolves nothing. torch is the CPU build: if pip only finds another build,
set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
import venv
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
AT = HERE.parents[1] / "out" / "peers"


@dataclass(frozen=True)
class Peer:
    """A peer engine, as a table of peers.toml describes it."""

    name: str
    formats: tuple[str, ...]
    note: str
    env: dict[str, str] = field(default_factory=dict)
    build: dict[str, str] = field(default_factory=dict)  # environment variables for pip, for packages built from source

    @property
    def lock(self) -> Path:
        return HERE / "locks" / f"{self.name}.txt"

    @property
    def python(self) -> Path:
        return AT / self.name / "bin" / "python" if self.lock.exists() else Path(sys.executable)

    def is_made(self) -> bool:
        """Return whether the peer's environment exists and was made from the current lock file and build variables."""
        return not self.lock.exists() or (self.stamp.exists() and self.stamp.read_text(encoding="utf-8") == self.recipe)

    @property
    def stamp(self) -> Path:
        return AT / self.name / "lock.txt"

    @property
    def recipe(self) -> str:
        built = "".join(f"# {name}={value}\n" for name, value in self.build.items())
        return built + self.lock.read_text(encoding="utf-8")


def peers() -> dict[str, Peer]:
    rows = tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))
    return {
        name: Peer(
            name, tuple(row["formats"]), row["note"], _variables(row.get("env", {})), _variables(row.get("build", {}))
        )
        for name, row in rows.items()
    }


def _variables(table: dict[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in table.items()}


def make(peer: Peer) -> None:
    """Make the environment of a peer, if needed. Raises CalledProcessError if pip fails; the next call tries again."""
    if peer.is_made():
        return
    folder = AT / peer.name
    venv.create(folder, with_pip=True, clear=True)
    command = [str(peer.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # A cached wheel may have been built with other variables.
    how = ["--no-cache-dir"] if peer.build else []
    subprocess.run([*command, *how, "-r", str(peer.lock)], check=True, env={**os.environ, **peer.build})
    peer.stamp.write_text(peer.recipe, encoding="utf-8")


def main() -> int:
    known = peers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"peers; all if none is given: {', '.join(known)}")
    names = parser.parse_args().names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no peer is called {unknown[0]}; expected {', '.join(known)}")
    failed = []
    for name in names:
        start = time.monotonic()
        print(f"{name:14} {known[name].note}", flush=True)
        try:
            make(known[name])
        except subprocess.CalledProcessError:
            failed.append(name)
        else:
            print(f"{'':14} ready, {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"not installed: {', '.join(failed)}; pip says why above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
