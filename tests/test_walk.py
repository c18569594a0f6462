"""The tool that counts the files of a walk."""

import subprocess
import sys
from pathlib import Path

import pytest
from walk import _lines

ROOT = Path(__file__).parent.parent


def test_an_arrow_is_before_a_file_that_was_entered_before() -> None:
    assert list(_lines(["a.py", "b.py", "a.py"])) == ["   a.py", "   b.py", "<- a.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "first", "enters"),
    [
        ("compile", "compiler/build.py", "codegen/artifact_writer.py"),
        ("generate", "runtime/step/sampling_params.py", "runtime/runners/cpu/runner.py"),
        ("http", "serve/http/acceptor.py", "runtime/openai/request.py"),
    ],
)
def test_a_walk(what: str, first: str, enters: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "walk.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary, _, *way = done.stdout.splitlines()
    assert "stays in" in summary and "returns" in summary
    names = [line[3:] for line in way]
    assert first in names[:8] and enters in names, names
