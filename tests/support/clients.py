"""Clients of others, in environments of their own: what they pin is not what inferc runs with."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "clients"


def environment(name: str) -> Path:
    """The environment's folder of programs; the test is skipped without it."""
    folder = ROOT / ".venv-clients" / name
    if not (folder / ".installed").exists():
        pytest.skip(f"the clients {name} of tests/clients are not installed: make .venv-clients/{name}/.installed")
    return folder / "bin"


def run_client(name: str, script: str, *arguments: str, timeout: float = 120) -> Any:
    """Run a script of tests/clients, and return what it prints as JSON."""
    return _printed([str(environment(name) / "python"), str(SCRIPTS / script), *arguments], timeout)


def run_node_client(script: str, *arguments: str, timeout: float = 120) -> Any:
    """Run a module of tests/clients/javascript, and return what it prints as JSON.

    It comes by standard input, so that what it imports is looked for where the clients are installed.
    """
    folder = environment("javascript").parent
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "")
    node: Path | str | None = folder / "node_modules" / f"node-linux-{machine}" / "bin" / "node"
    if not Path(str(node)).exists() and (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    command = [str(node), "--no-warnings", "--input-type=module", "-", *arguments]
    return _printed(command, timeout, folder, (SCRIPTS / "javascript" / script).read_text())


def _printed(command: list[str], timeout: float, folder: Path | None = None, given: str = "") -> Any:
    result = subprocess.run(
        command, cwd=folder, input=given, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
