"""Artifacts for a GPU that tests compile, and the separate process in which they run with interpreted kernels.

TRITON_INTERPRET=1 must be set before Triton is imported, and nothing can be compiled where it is.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from inferc.codegen.triton import code
from inferc.codegen.triton.aot.occupancy import PROGRAMS
from inferc.codegen.triton.calls import matmul
from inferc.compiler import build as compiler
from inferc.frontend.capture import capture


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """Fewer kernels, of fewer programs; no check of the captured graph, which is not what is tried here."""
    with (
        mock.patch.object(matmul, "ROW_BOUNDS", (16, None)),
        mock.patch.dict(PROGRAMS, dict.fromkeys(PROGRAMS, 20)),
        mock.patch.object(compiler, "capture", partial(capture, check=False)),
    ):
        yield


@contextmanager
def without_ptx() -> Iterator[None]:
    """Have artifacts for a GPU no PTX, which their tests on the fake one need not."""
    write = code.write_code

    def write_no_ptx(*arguments: Any, with_ptx: bool = True) -> Any:
        return write(*arguments, with_ptx=False)

    with mock.patch.object(code, "write_code", write_no_ptx):
        yield


def assert_passes(artifacts: Path, models: Sequence[str], *arguments: str) -> None:
    """The tests in on_fake_gpu/ that pytest's arguments choose, those of all models for these."""
    of_files = {"INFERC_FAKE_GPU_ARTIFACTS": str(artifacts), "INFERC_FAKE_GPU_MODELS": " ".join(models)}
    env = {**os.environ, "TRITON_INTERPRET": "1", **of_files}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
