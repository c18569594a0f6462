"""Kernels compile for AMD's MI300 as well. Nothing runs them there: this is to keep that possible.

They compile to its machine code, by the compiler and linker that Triton brings, without a GPU or a driver.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from all_cases import KERNELS
from sampling_cases import kernels_of

pytestmark = pytest.mark.long

FOR_GFX942 = Path(__file__).parent / "for_gfx942.py"
SUPPORT = Path(__file__).parents[2] / "support"
SHARED = 64 << 10  # bytes that the chip gives a block


@pytest.mark.slow
def test_kernels_compile_for_an_mi300() -> None:
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, FOR_GFX942],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found.keys() == {*KERNELS, *kernels_of(1000)}
    for kernel, cases in found.items():
        for case, made in cases.items():
            assert made["code"] > 0 and made["spilled"] == 0 and made["shared"] <= SHARED, (kernel, case, made)
