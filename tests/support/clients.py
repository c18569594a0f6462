"""Clients of others, in environments of their own: what they pin is not what inferc runs with."""

from __future__ import annotations

import json
import os
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
    return _printed([str(environment(name) / "python"), str(SCRIPTS / script), *arguments], timeout, {})


def run_node_client(name: str, script: str, *arguments: str, timeout: float = 120) -> Any:
    """Run a JavaScript of tests/clients, and return what it prints as JSON."""
    node, packages = shutil.which("node"), environment(name).parent / "node_modules"
    if node is None:
        pytest.skip("node is not installed")
    return _printed([node, str(SCRIPTS / script), *arguments], timeout, {"NODE_PATH": str(packages)})


def _printed(command: list[str], timeout: float, variables: dict[str, str]) -> Any:
    result = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
